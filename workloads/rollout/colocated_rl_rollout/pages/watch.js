// Reads the other pages of this port and shows what they say. It only asks: every request is a GET.
// Words of samples are of strangers: they become text nodes, and no string is ever parsed as HTML.

const POLL_MS = 2000;
const RETRY_MS = 1000;
const NEWEST = 100; // samples that are asked for at a time
const SHOWN = 50; // of those that match
const KEPT = 2000;
const LEGEND = 24; // steps
const AGAIN = 3; // of the newest batches, which are read again
const HUES = 8; // .w0 to .w7 of the style
const at = (id) => document.getElementById(id);

// --- elements
function make(name, fields = {}, ...children) {
    const made = document.createElement(name);
    const { of, ...rest } = fields;
    Object.assign(made, rest);
    if (of) made.setAttribute("scope", of);
    made.append(...children);
    return made;
}

function drawn(name, attributes, ...children) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
}

// Make these the children of a parent, without a touch to those in place: they keep focus and scroll.
function arrange(parent, children) {
    let next = parent.firstChild;
    for (const child of children) {
        if (child === next) next = next.nextSibling;
        else parent.insertBefore(child, next);
    }
    while (next) {
        const gone = next;
        next = next.nextSibling;
        gone.remove();
    }
}

const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;
// Control characters and marks of writing direction, which could make a text look like another one, as their numbers.
const plain = (text) => text.replace(HIDDEN, (one) => `\\u${one.charCodeAt(0).toString(16).padStart(4, "0")}`);

function number(value) {
    if (value === null || value === undefined) return "–";
    return Math.abs(value) < 1000 ? `${Number(value.toPrecision(3))}` : Math.round(value).toLocaleString("en");
}

// --- the pages
async function page(path) {
    const answer = await fetch(path, { cache: "no-store" });
    if (!answer.ok) throw new Error(`${path}: ${answer.status} ${(await answer.text()).slice(0, 200)}`);
    return answer.json();
}

const wait = (ms) => new Promise((done) => setTimeout(done, ms));

function connected(word, why = "") {
    const status = at("connection");
    const text = why ? `${word}: ${why}` : word;
    if (status.textContent !== text) status.textContent = text;
    status.className = word === "live" ? "live" : "lost";
}

// --- learning
const batches = [];
const evaluations = [];

const share = (part) => (one) => (part(one) === null ? null : part(one) / one.samples);
const ages = (one) => Object.entries(one.staleness).map(([age, count]) => [Number(age), count]);
const total = (pairs) => pairs.reduce((sum, [, count]) => sum + count, 0);
const mean = (pairs) =>
    total(pairs) ? pairs.reduce((sum, [age, count]) => sum + age * count, 0) / total(pairs) : null;
const CURVES = [
    { title: "Reward", lines: [["mean of the batch", (one) => one.rewardMean]], evaluated: true },
    {
        title: "Staleness, steps",
        from: 0,
        lines: [
            ["mean of tokens", (one) => mean(ages(one))],
            ["oldest token", (one) => (total(ages(one)) ? Math.max(...ages(one).map(([age]) => age)) : null)],
        ],
    },
    { title: "Mismatch, nats", from: 0, lines: [["engine and trainer", (one) => one.climb?.mismatch ?? null]] },
    { title: "Tokens per sample", from: 0, lines: [["trained", (one) => one.lossTokens / one.samples]] },
    {
        title: "Share of samples",
        from: 0,
        to: 1,
        lines: [
            ["went on over a switch", share((one) => one.resumedSamples)],
            ["cut by the limit", share((one) => one.truncated)],
        ],
    },
];
const [WIDTH, HEIGHT] = [300, 140];
const [LEFT, RIGHT, TOP, BOTTOM] = [32, 8, 8, 20]; // around the lines

// Round values for the axis of these: up to three steps of 1, 2, 2.5, 5 or 10 times a power of ten.
function axis(low, high) {
    const span = high > low ? high - low : Math.abs(low) || 1;
    const power = 10 ** Math.floor(Math.log10(span / 3));
    const step = power * [1, 2, 2.5, 5, 10].find((times) => power * times >= span / 3);
    const first = Math.floor(low / step + 1e-9);
    const last = Math.max(first + 1, Math.ceil(high / step - 0.1)); // a little beyond it is still in the picture
    return Array.from({ length: last - first + 1 }, (_, place) => (first + place) * step);
}

function curve({ title, lines, from, to, evaluated }) {
    const results = evaluated ? evaluations : [];
    const series = lines.map(([name, read]) => [
        name,
        batches.map((one) => [one.step, read(one)]).filter(([, value]) => value !== null),
    ]);
    const values = [
        ...series.flatMap(([, points]) => points.map(([, value]) => value)),
        ...results.flatMap((one) => [one.mean - one.stderr, one.mean + one.stderr]),
    ];
    const steps = [...batches.map((one) => one.step), ...results.map((one) => one.step)];
    const [first, last] = [Math.min(...steps), Math.max(...steps)];
    const ticks = axis(Math.min(...values, from ?? Infinity), Math.max(...values, to ?? -Infinity));
    const [low, high] = [ticks[0], ticks.at(-1)];
    const x = (step) => LEFT + (WIDTH - LEFT - RIGHT) * (last > first ? (step - first) / (last - first) : 0.5);
    const y = (value) => HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * ((value - low) / (high - low));

    const parts = ticks.flatMap((value) => [
        drawn("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }),
        drawn("text", { x: LEFT - 5, y: y(value) + 3, "text-anchor": "end" }, number(value)),
    ]);
    const [start, anchor] = last > first ? [LEFT, "start"] : [x(first), "middle"];
    parts.push(drawn("text", { x: start, y: HEIGHT - 5, "text-anchor": anchor }, `step ${first}`));
    if (last > first) parts.push(drawn("text", { x: WIDTH - RIGHT, y: HEIGHT - 5, "text-anchor": "end" }, `${last}`));
    series.forEach(([, points], place) => {
        const look = "ab"[place];
        const path = points.map(([step, value]) => `${x(step).toFixed(1)} ${y(value).toFixed(1)}`).join("L");
        parts.push(drawn("path", { class: `line ${look}`, d: path && `M${path}` }));
        if (points.length > 40) return;
        for (const [step, value] of points)
            parts.push(drawn("circle", { class: look, cx: x(step), cy: y(value), r: 2.2 }));
    });
    for (const one of results) {
        const [here, down, up] = [x(one.step), y(one.mean - one.stderr), y(one.mean + one.stderr)];
        parts.push(drawn("line", { class: "eval", x1: here, x2: here, y1: down, y2: up }));
        parts.push(drawn("circle", { class: "eval", cx: here, cy: y(one.mean), r: 3.2 }));
    }
    const measured = series.map(([, points]) => number(points.at(-1)?.[1]));
    const newest = lines.map(([name], place) => `${name} ${measured[place]}`).join(", ");
    const label = `${title} by step, from step ${first} to ${last}; newest: ${newest}`;
    const picture = drawn("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label }, ...parts);
    const shown = make("output", {}, measured[0]);
    const cursor = drawn("line", { class: "cursor", visibility: "hidden", y1: TOP, y2: HEIGHT - BOTTOM });
    picture.append(cursor);
    picture.addEventListener("pointermove", (event) => {
        const box = picture.getBoundingClientRect();
        const here = ((event.clientX - box.left) / box.width) * WIDTH;
        const nearest = batches.reduce((best, one) =>
            Math.abs(x(one.step) - here) < Math.abs(x(best.step) - here) ? one : best,
        );
        for (const end of ["x1", "x2"]) cursor.setAttribute(end, x(nearest.step));
        cursor.setAttribute("visibility", "visible");
        shown.textContent = `step ${nearest.step}: ${lines.map(([, read]) => number(read(nearest))).join(" · ")}`;
    });
    const sets = [...new Set(results.map((one) => plain(one.name)))].join(", ");
    const names = [
        ...lines.map(([name], place) => [name, "ab"[place]]),
        ...(sets ? [[`evaluation (${sets})`, "eval"]] : []),
    ];
    return make(
        "figure",
        {},
        make("figcaption", {}, make("b", {}, title), shown),
        picture,
        make("p", { className: "key" }, ...names.map(([name, look]) => make("span", { className: look }, name))),
    );
}

function table(place, heads, rows) {
    const looks = heads.map((_, column) => (rows.some((row) => typeof row[column] === "number") ? "number" : ""));
    const head = (text, column) => make("th", { of: "col", className: looks[column] }, text);
    const cell = (value, column) =>
        make(
            column ? "td" : "th",
            { of: column ? "" : "row", className: looks[column] },
            typeof value === "number" ? number(value) : value,
        );
    place.replaceChildren(
        make("thead", {}, make("tr", {}, ...heads.map(head))),
        make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map(cell)))),
    );
}

function showLearning() {
    const isThere = batches.length > 0;
    at("no-batches").hidden = isThere;
    at("curves").hidden = at("figures").hidden = !isThere;
    if (!isThere) return;
    at("curves").replaceChildren(...CURVES.map(curve));
    showFigures();
}

function showFigures() {
    if (!at("figures").open) return;
    const columns = CURVES.flatMap(({ title, lines }) => lines.map(([name, read]) => [`${title}: ${name}`, read]));
    const rows = batches.map((one) => [
        one.step,
        ...columns.map(([, read]) => read(one) ?? "–"),
        evaluations
            .filter((each) => each.step === one.step)
            .map((each) => `${plain(each.name)} ${number(each.mean)} ± ${number(each.stderr)}`)
            .join(", "),
    ]);
    table(at("steps"), ["Step", ...columns.map(([name]) => name), "Evaluated after this step"], rows.reverse());
}

async function readLearning() {
    let more;
    const known = batches.slice(0, -AGAIN); // a step's climb ends after its batch was sealed
    do {
        more = (await page(`/v1/batches?after=${known.at(-1)?.step ?? 0}`)).batches;
        known.push(...more);
    } while (more.length);
    batches.splice(0, Infinity, ...known);
    evaluations.splice(0, Infinity, ...(await page("/v1/evaluations")).evaluations);
    showLearning();
}

// --- now
function showNow({ facts, engines }) {
    const open = engines.filter((one) => one.open).length;
    const shown = [
        ["Sealed", facts.sealed ? `step ${facts.sealed.step}` : "–"],
        ["Trained", `step ${facts.trainedStep}`],
        ["Tokens a second", number(facts.tokensPerSecond)],
        ["Open gates", `${open} of ${engines.length}`],
    ];
    at("now").replaceChildren(
        ...shown.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))),
    );
    at("problem").hidden = !facts.problem;
    const problem = facts.problem ? `${facts.problem.reason}: ${plain(facts.problem.message)}` : "";
    if (at("problem").textContent !== problem) at("problem").textContent = problem;
    at("no-engines").hidden = engines.length > 0;
    at("engines").parentElement.hidden = !engines.length;
    const gate = (isOpen) => (isOpen === null ? "no answer" : isOpen ? "open" : "closed");
    table(
        at("engines"),
        ["Pod", "GPU is held by", "Why", "Gate", "Weights", "Requests"],
        engines.map((one) => [
            one.pod,
            one.holder ?? "not known here",
            one.why,
            gate(one.open),
            one.version ? weights(Number(one.version.split("-")[0])) : "–",
            one.inFlight,
        ]),
    );
    at("counts").textContent =
        Object.entries(facts.samples)
            .map(([state, count]) => `${number(count)} ${state}`)
            .join(" · ") || "none yet";
}

// --- samples
const samples = new Map(); // by id
const cards = new Map();
let ended = null; // place of the newest that came, among all that ended
let askedTo = Number.MAX_SAFE_INTEGER; // the id down to which older ones were asked for
let waiting = 0; // that came while the list is not live
let limit = SHOWN;
let refusal = ""; // why samples are not followed

const hue = (step) => `weights w${step % HUES}`;
const weights = (step) => make("span", { className: `tag ${hue(step)}` }, `step ${step}`);

function marked(text, query) {
    if (!query) return [text];
    const lower = text.toLowerCase();
    if (lower.length !== text.length) return [text]; // a few capitals become two letters
    const parts = [];
    let from = 0;
    for (let found = lower.indexOf(query); found >= 0; found = lower.indexOf(query, from)) {
        parts.push(text.slice(from, found), make("mark", {}, text.slice(found, found + query.length)));
        from = found + query.length;
    }
    return [...parts, text.slice(from)];
}

function span({ step, trained, tokens, text }, query) {
    const who = !trained ? "context" : step === null ? "no version" : `step ${step}`;
    const look = !trained ? "context" : step === null ? "unknown" : hue(step);
    return make(
        "span",
        { className: look, title: `${who}: ${number(tokens)} tokens` },
        make("span", { className: "tag" }, who),
        ...marked(plain(text), query),
    );
}

function card(one, query) {
    const key = JSON.stringify([one.state, one.step, query]);
    const before = cards.get(one.id);
    if (before?.key === key) return before.card;
    const tokens = one.spans.reduce((sum, each) => sum + each.tokens, 0);
    const facts = [
        make("b", {}, `#${one.id}`),
        make("span", { className: one.state }, one.state),
        ...(one.reason ? [make("span", {}, plain(one.reason))] : []),
        make("span", {}, "reward ", make("b", {}, number(one.reward))),
        ...Object.entries(one.figures).map(([name, value]) => make("span", {}, `${plain(name)} ${number(value)}`)),
        make("span", {}, `${number(tokens)} tokens`),
        ...(one.finish === "length" ? [make("span", {}, "cut by the limit")] : []),
        ...(one.step === null ? [] : [make("span", {}, `in batch ${one.step}`)]),
        make("span", {}, `group ${one.group_id}`),
    ];
    const text = (className, label, ...children) =>
        make("pre", { className, role: "group", ariaLabel: label, dir: "auto" }, ...children);
    const made = make("li", {}, make("p", { className: "facts" }, ...facts));
    if (one.prompt !== null)
        made.append(text("prompt", `prompt of sample ${one.id}`, ...marked(plain(one.prompt), query)));
    if (one.response !== null)
        made.append(text("response", `response of sample ${one.id}`, ...one.spans.map((each) => span(each, query))));
    cards.set(one.id, { key, card: made });
    return made;
}

function matches(one, query, state) {
    if (state && one.state !== state) return false;
    return (
        !query ||
        [`#${one.id}`, one.state, one.reason, one.prompt ?? "", one.response ?? ""].some((text) =>
            plain(text).toLowerCase().includes(query),
        )
    );
}

function showSamples() {
    const query = at("query").value.trim().toLowerCase();
    const state = at("state").value;
    waiting = 0;
    at("waiting").textContent = "";
    const all = [...samples.values()].sort((one, other) => other.ended - one.ended);
    const found = all.filter((one) => matches(one, query, state));
    const shown = found.slice(0, limit);
    const made = shown.map((one) => card(one, query));
    arrange(at("samples"), made);
    for (const text of at("samples").querySelectorAll("pre"))
        if (text.scrollHeight > text.clientHeight) text.tabIndex = 0; // by keyboard too
    const which =
        query || state
            ? `${number(found.length)} of ${number(all.length)} loaded samples match`
            : `${number(all.length)} samples are loaded`;
    const part = found.length > shown.length ? `; the newest ${shown.length} are shown` : "";
    at("matches").textContent = all.length ? which + part : "No sample has ended yet.";
    const drew = shown.flatMap((one) => one.spans.filter((each) => each.step !== null).map((each) => each.step));
    const steps = [...new Set(drew)].sort((one, other) => other - one).slice(0, LEGEND);
    at("older").hidden = !all.length;
    at("legend").hidden = !steps.length;
    at("legend").replaceChildren("Each token is coloured by the weights that drew it: ", ...steps.map(weights));
}

function take(rows) {
    for (const row of rows) if (row.ended !== null) samples.set(row.id, row);
}

function dropOldest() {
    const oldest = [...samples.values()].sort((one, other) => other.ended - one.ended).slice(KEPT);
    for (const { id } of oldest) {
        samples.delete(id);
        cards.delete(id);
    }
}

let isPlanned = false;
function planSamples() {
    if (!at("live").checked) {
        waiting += 1;
        at("waiting").textContent = `(${number(waiting)} more)`;
        return;
    }
    if (!isPlanned)
        requestAnimationFrame(() => {
            isPlanned = false;
            showSamples();
        });
    isPlanned = true;
}

async function followSamples() {
    for (;;) {
        try {
            const from = ended === null ? `limit=${NEWEST}` : `after=${ended}`;
            const answer = await fetch(`/v1/samples?follow=true&text=true&${from}`);
            if (answer.status === 400) location.reload(); // the store is another one
            if (!answer.ok) throw new Error(await answer.text());
            refusal = "";
            const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
            let line = "";
            for (let read = await reader.read(); !read.done; read = await reader.read()) {
                const lines = (line + read.value).split("\n");
                line = lines.pop();
                for (const row of lines.filter(Boolean).map((each) => JSON.parse(each))) {
                    take([row]);
                    ended = row.ended;
                    planSamples();
                }
                if (samples.size > KEPT) dropOldest();
            }
        } catch (error) {
            if (!(error instanceof TypeError)) refusal = plain(error.message); // else nobody answers: `watch` says it
        }
        await wait(RETRY_MS);
    }
}

// A sample ends once, and is sealed and trained later: what became of those that are shown.
async function readStates() {
    for (const { id, state, step, reason } of (await page("/v1/samples?limit=1000")).samples) {
        const known = samples.get(id);
        if (known) samples.set(id, { ...known, state, step, reason });
    }
    if (at("live").checked) showSamples();
}

async function readOlder() {
    const button = at("older");
    button.disabled = true;
    try {
        const known = samples.size;
        let found;
        do {
            found = (await page(`/v1/samples?text=true&limit=${NEWEST}&before=${askedTo}`)).samples;
            take(found);
            askedTo = found.at(-1)?.id ?? askedTo;
        } while (samples.size === known && found.length === NEWEST); // samples end in another order than they began
        limit += NEWEST;
        showSamples();
        button.disabled = found.length < NEWEST;
        if (button.disabled) button.textContent = "All older samples are in a checkpoint, and only counted";
    } catch (error) {
        button.disabled = false;
        connected("no answer", plain(error.message));
    }
}

// --- everything, until the window is closed
async function watch() {
    let [job, seen] = ["", ""];
    for (; ; await wait(POLL_MS)) {
        if (document.hidden) continue;
        try {
            const [{ hello }, progress] = await Promise.all([page("/v1/state"), page("/v1/progress")]);
            if (job && job !== hello.jobUid) location.reload(); // the port leads to another pod now
            job = hello.jobUid;
            at("pod").textContent = document.title = plain(hello.pod);
            showNow(progress);
            connected(refusal ? "samples are not followed" : "live", refusal);
            const { sealed, trainedStep, evaluated } = progress.facts;
            const now = JSON.stringify([sealed, trainedStep, evaluated]);
            if (now !== seen) await Promise.all([readLearning(), readStates()]);
            seen = now;
        } catch (error) {
            const why = error instanceof TypeError ? "is kubectl port-forward still running?" : plain(error.message);
            connected("no answer", why);
        }
    }
}

function search() {
    limit = SHOWN;
    showSamples();
}

for (const state of ["completed", "sealed", "trained", "filtered", "failed", "discarded"])
    at("state").append(make("option", { value: state }, state));
at("search").addEventListener("submit", (event) => event.preventDefault());
at("query").addEventListener("input", search);
at("state").addEventListener("input", search);
at("live").addEventListener("input", () => at("live").checked && showSamples());
at("older").addEventListener("click", readOlder);
at("figures").addEventListener("toggle", showFigures);
watch();
followSamples();
