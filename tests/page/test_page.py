"""The page of a job in Chromium, as the rollout controller's own process serves it; engines are played.

Chromium runs what the page does, under the policy that it comes with. After each test nothing but GETs has gone out, to
that port alone, and the console is empty.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from integration.test_rollout_process import ControllerProcess, lines, running
from playwright.async_api import Browser, Page, async_playwright, expect

from colocated_rl_api.facts import EvaluationResult
from colocated_rl_api.member_wire import Climbed
from colocated_rl_api.names import PromptPosition
from colocated_rl_api.rungs import WeightVersion
from colocated_rl_rollout.rules.samples import Finish, Prompt, Span, Tokens
from colocated_rl_rollout.store.batches import KeptClimb, write_batch
from colocated_rl_rollout.store.store import Store
from fakes.gate import FakeGate
from fakes.rollout import JOB_UID, JobOnDisk, WorkedSums, make_spec
from fakes.tasks import task_server

pytestmark = pytest.mark.asyncio(loop_scope="module")

STEPS = 12
HOSTILE = (
    "<script>document.title = 'owned'; fetch('/v1/sessions/x', {method: 'DELETE'})</script>"
    "<img src=x onerror=\"document.title = 'owned'\"></pre><style>body { display: none }</style>"
    "<a href='javascript:alert(1)'>2 + 2</a> \u202edetrever\u202c = 4\x1b[2J"
)
HOSTILE_SHOWN = HOSTILE.replace("\u202e", "\\u202e").replace("\u202c", "\\u202c").replace("\x1b", "\\u001b")
PIECES = [("I ask the tool. ", 10), ("It says 4 (naïve 漢字).\n", None), ("So it is 4. Answer: 4", 11)]


@dataclass
class PageScene:
    """A rollout controller's process whose store has STEPS sealed batches, and two samples behind them."""

    job: JobOnDisk
    life: ControllerProcess
    gates: list[FakeGate]
    browser: Browser

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{lines(self.life.log, 'rollout controller ready')[0]['ports']['pages']}/"


@dataclass
class Watched:
    page: Page
    requests: list[tuple[str, str]] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


@asynccontextmanager
async def watching(scene: PageScene, **options: Any) -> AsyncIterator[Page]:
    """Open the page in a window of its own, once it shows samples; see in the end what it did."""
    window = await scene.browser.new_context(**options)
    watched = Watched(await window.new_page())
    page = watched.page
    page.on("request", lambda request: watched.requests.append((request.method, request.url)))
    page.on("console", lambda message: watched.complaints.append(message.text))
    page.on("pageerror", lambda error: watched.complaints.append(str(error)))
    try:
        await page.goto(scene.url)
        await expect(page.locator("#connection")).to_have_text("live")
        await expect(page.locator("#curves svg").first).to_be_visible()
        await expect(page.locator("#samples > li").first).to_be_visible()
        yield page
        assert [] == watched.complaints
        assert {("GET", scene.url)} == {(method, url[: len(scene.url)]) for method, url in watched.requests}
    finally:
        await window.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[PageScene]:
    place = tmp_path_factory.mktemp("job")
    job = JobOnDisk.write(place, make_spec())
    fill(job)
    gates = [FakeGate(f"sums-gpu-{number}-0", job.tls, WorkedSums(place / "model")) for number in range(2)]
    async with AsyncExitStack() as stack:
        stack.enter_context(task_server(place, path=job.tasks))
        for gate in gates:
            await stack.enter_async_context(gate.listening())
        life = await stack.enter_async_context(running(job))
        await life.operator.send(1, [gate.endpoint for gate in gates], trained_step=STEPS - 1, saved_step=STEPS - 4)
        playwright = await stack.enter_async_context(async_playwright())
        browser = await playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        stack.push_async_callback(browser.close)
        yield PageScene(job, life, gates, browser)


def fill(job: JobOnDisk) -> None:
    """Fill the store of a job: batch N has reward N / STEPS, and checkpoints hold the first ones."""
    store = Store(job.directory / "state", job_uid=JOB_UID)
    for step in range(1, STEPS + 1):
        sample = begun(job, store, "problem: 1 + 1 =")
        store.finish(sample, tokens(job, [("Answer: 2", step - 1)]), Finish.STOP)
        store.score(sample, step / STEPS)
        record = write_batch(store.batch_directory, [sample.group], step=step, shards=2, temperature=1.0, seed=0)
        store.seal(record, [sample.group])
        if step < STEPS - 1:  # the newest one is not trained, and the one before not served yet
            store.remember_climb(KeptClimb(epoch=step + 1, step=step, took_s={}, mismatch=0.01 * step, ended=step))
        store.commit(min(step, STEPS - 1))
        store.forget(min(step, STEPS - 4))
    store.record_evaluation(EvaluationResult(name="held-out", step=4, samples=8, mean=0.25, stderr=0.05))
    for finish, pieces in ((Finish.STOP, PIECES), (Finish.LENGTH, [(HOSTILE, 11)])):
        sample = begun(job, store, "problem: 2 + 2 =")
        store.finish(sample, tokens(job, pieces), finish)
        store.score(sample, 1.0)
    store.close()


def begun(job: JobOnDisk, store: Store, words: str) -> Any:
    prompt = Prompt(PromptPosition(store.cursor), store.cursor, job.chat.encode(words))
    (sample,) = store.admit(prompt, size=1).samples
    store.start(sample)
    return sample


def tokens(job: JobOnDisk, pieces: Iterable[tuple[str, int | None]]) -> Tokens:
    """A response in pieces, each with the step of its weights; None: a tool's words."""
    ids: list[int] = []
    spans = []
    for text, step in pieces:
        added = job.chat.encode(text)
        if step is not None:
            spans.append(Span(WeightVersion(step, 1), len(ids), len(ids) + len(added)))
        ids += added
    return Tokens(np.array(ids, np.int32), -np.ones(len(ids), np.float32), tuple(spans))


async def test_learning_is_a_curve_by_step_and_a_table_also_of_batches_that_a_checkpoint_holds(
    scene: PageScene,
) -> None:
    async with watching(scene) as page:
        reward = page.get_by_role("img", name=f"Reward by step, from step 1 to {STEPS}; newest: mean of the batch 1")
        await expect(reward.locator("path.line")).to_have_attribute("d", re.compile(f"^M[^L]+(L[^L]+){{{STEPS - 1}}}$"))
        await expect(reward.locator("circle.eval")).to_have_count(1)
        await expect(page.get_by_role("img", name="Staleness")).to_have_count(1)
        mismatch = page.get_by_role("img", name=re.compile("Mismatch, nats by step.*newest: engine and trainer 0.1$"))
        await expect(mismatch.locator("circle.a")).to_have_count(STEPS - 2)
        await page.get_by_text("All figures, by step").press("Enter")
        rows = page.get_by_role("region", name="All figures, by step").get_by_role("row")
        await expect(rows).to_have_count(1 + STEPS)
        await expect(rows.filter(has=page.get_by_role("rowheader", name="4", exact=True))).to_contain_text(
            "held-out 0.25 ± 0.05"
        )


async def test_a_gpu_is_rollouts_while_its_gate_is_open_and_otherwise_the_page_says_that_it_does_not_know(
    scene: PageScene,
) -> None:
    await scene.gates[0].open(WeightVersion(STEPS - 1, 1), pace=0)
    async with watching(scene) as page:
        rows = page.get_by_role("region", name="Who has each GPU").get_by_role("row")
        await expect(rows.nth(1)).to_contain_text("rollout")
        await expect(rows.nth(1)).to_contain_text(f"step {STEPS - 1}")
        await expect(rows.nth(2)).to_contain_text("not known here")
        await expect(rows.nth(2)).to_contain_text(f"batch {STEPS} waits for training")
    await scene.gates[0].close()


async def test_tokens_are_coloured_by_the_weights_that_drew_them(scene: PageScene) -> None:
    async with watching(scene) as page:
        spans = page.get_by_label(f"response of sample {STEPS + 1}").locator("> span")
        await expect(spans).to_have_count(3)
        assert [
            f"{'context' if step is None else f'step {step}'}{text}" for text, step in PIECES
        ] == await spans.all_text_contents()
        colours = [await span.evaluate("span => getComputedStyle(span).backgroundColor") for span in await spans.all()]
        assert "rgba(0, 0, 0, 0)" == colours[1]
        assert 3 == len(set(colours))
        same = page.get_by_label(f"response of sample {STEPS}").locator("> span")
        assert colours[2] == await same.evaluate("span => getComputedStyle(span).backgroundColor")


async def test_samples_are_searched_by_words_id_and_state(scene: PageScene) -> None:
    async with watching(scene) as page:
        found, query = page.locator("#samples > li"), page.get_by_role("searchbox", name="Search")
        await expect(found).to_have_count(2 + 4)
        await query.fill("NAÏVE")
        await expect(found).to_have_count(1)
        await expect(found.locator("mark")).to_have_text("naïve")
        await expect(page.locator("#matches")).to_have_text("1 of 6 loaded samples match")
        await query.fill(f"#{STEPS}")
        await expect(found.locator("b").first).to_have_text(f"#{STEPS}")
        await query.fill("")
        await page.get_by_role("combobox", name="State").select_option("trained")
        await expect(found).to_have_count(3)
        await page.get_by_role("button", name="Load older samples").click()
        await expect(page.get_by_role("button", name="in a checkpoint")).to_be_disabled()


async def test_words_of_a_stranger_stay_words(scene: PageScene) -> None:
    async with watching(scene) as page:
        response = page.get_by_label(f"response of sample {STEPS + 2}").locator("> span")
        await expect(response).to_have_text(f"step 11{HOSTILE_SHOWN}")
        await expect(response.locator("*")).to_have_count(1)
        await page.get_by_role("searchbox").fill("<img src=x")
        await expect(response.locator("mark")).to_have_text("<img src=x")
        assert "job-rollout-0-0" == await page.title()
        assert [0, 1, 1] == [await page.locator(name).count() for name in ("img, a", "script", "style")]


VIOLATED = """([attempt]) => new Promise((done) => {
    addEventListener("securitypolicyviolation", (violation) => done(violation.effectiveDirective), { once: true });
    try { new Function(attempt)() } catch { } // which is how some attempts are refused
})"""


@pytest.mark.parametrize(
    ("attempt", "directive"),
    [
        ("document.body.innerHTML = '<img src=x onerror=\"owned = 1\">'", "require-trusted-types-for"),
        ("document.body.setAttribute('onclick', 'owned = 1')", "require-trusted-types-for"),
        (
            "document.body.append(Object.assign(document.createElement('script'), {src: '/v1/progress'}))",
            "require-trusted-types-for",
        ),
        ("document.body.append(Object.assign(document.createElement('img'), {src: '//localhost:1/'}))", "img-src"),
        ("document.body.append(Object.assign(document.createElement('iframe'), {src: '/'}))", "frame-src"),
        ("fetch('//localhost:1/')", "connect-src"),
    ],
)
async def test_the_browser_runs_and_sends_nothing_for_what_came_to_be_in_the_page(
    scene: PageScene, attempt: str, directive: str
) -> None:
    """The policy alone, as if the page had a hole."""
    window = await scene.browser.new_context()
    page = await window.new_page()
    await page.goto(scene.url)
    assert directive == await page.evaluate(VIOLATED, [attempt])
    assert await page.evaluate("window.owned") is None
    await window.close()


async def test_samples_come_in_as_they_end_and_one_that_went_on_over_a_switch_has_both_colours(
    scene: PageScene,
) -> None:
    async with watching(scene) as page:
        newest = page.locator("#samples > li").first
        gate = scene.gates[1]
        await gate.open(WeightVersion(STEPS - 1, 1), pace=4)
        await scene.life.operator.until(lambda facts: facts.samples.get("running"))
        await gate.close()
        await scene.life.operator.until(
            lambda facts: facts.samples.get("interrupted") and "running" not in facts.samples
        )
        await gate.open(WeightVersion(STEPS, 1))
        await expect(newest.locator(".response > span > .tag")).to_have_text([f"step {STEPS - 1}", f"step {STEPS}"])


async def test_it_goes_on_once_the_port_answers_again_with_what_ended_meanwhile(
    scene: PageScene, tmp_path: Path
) -> None:
    """The controller is killed and starts again behind the same port, as a port-forward that is made again."""
    job = JobOnDisk.write(tmp_path, make_spec())
    fill(job)
    async with AsyncExitStack() as stack:
        stack.enter_context(task_server(tmp_path, path=job.tasks))
        life = await stack.enter_async_context(running(job))
        port = lines(life.log, "rollout controller ready")[0]["ports"]["pages"]
        window = await scene.browser.new_context()
        stack.push_async_callback(window.close)
        page = await window.new_page()
        await page.goto(f"http://127.0.0.1:{port}/")
        shown, connection = page.locator("#samples > li"), page.locator("#connection")
        await expect(shown).to_have_count(6)
        await life.kill()
        await expect(connection).to_have_text("no answer: is kubectl port-forward still running?")
        await expect(shown).to_have_count(6)
        store = Store(job.directory / "state", job_uid=JOB_UID)
        sample = begun(job, store, "problem: 3 + 3 =")
        store.finish(sample, tokens(job, [("Answer: 6", 11)]), Finish.STOP)
        store.score(sample, 1.0)
        store.close()
        await stack.enter_async_context(running(job, f"--pages-port={port}"))
        await expect(connection).to_have_text("live", timeout=20_000)
        await expect(shown).to_have_count(7)
        await expect(shown.first.locator("b").first).to_have_text(f"#{sample.id}")


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_it_can_be_read_on_a_phone_and_in_the_dark(scene: PageScene, scheme: Any) -> None:
    async with watching(scene, viewport={"width": 390, "height": 844}, color_scheme=scheme) as page:
        assert 390 == await page.evaluate("document.documentElement.scrollWidth")
        background, text = await page.evaluate("""() => {
            const style = getComputedStyle(document.body), level = (colour) => Number(colour.match(/[0-9]+/)[0]);
            return [level(style.backgroundColor), level(style.color)];
        }""")
        assert (background > text) == (scheme == "light")
        await page.keyboard.press("Tab")
        assert await page.evaluate("document.activeElement.tagName") == "SUMMARY"


async def test_the_mismatch_of_a_step_is_drawn_once_the_group_has_climbed_to_it(scene: PageScene) -> None:
    """It is the last test here, because with it the newest batch is trained."""
    async with watching(scene) as page:
        points = page.get_by_role("img", name="Mismatch").locator("circle.a")
        await expect(points).to_have_count(STEPS - 2)
        climbed = Climbed(epoch=STEPS, step=STEPS - 1, took_s={}, mismatch=0.5)
        engines = [gate.endpoint for gate in scene.gates]
        await scene.life.operator.send(1, engines, trained_step=STEPS, saved_step=STEPS - 4, climbed=climbed)
        await expect(points).to_have_count(STEPS - 1)
        await expect(page.get_by_role("img", name=re.compile("Mismatch.*trainer 0.5$"))).to_have_count(1)
