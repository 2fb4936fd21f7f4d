"""An oracle judges what a job of the local cluster has trained, by what the job does not tell of itself.

Pods, their logs and their exports come and go. So a `Witness` keeps, for as long as the job runs, what agents and
trainer ranks log, and every export that stands complete in a pod. `judge` then compares four things:

* the store's rows and the files of all batches: each step has a batch, each sample is in one;
* the log of each life of each trainer rank: it goes on from a step that was trained, then trains each step once, and
  on as many samples and tokens as the batch holds;
* the logs of the agents, which say the same;
* the log-probability of each token, computed again with the exports: it was drawn by the weights that its batch names.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sqlite3
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from cluster import Cluster
from e2e.conftest import MODEL
from e2e.running_job import RunningJob
from numpy.typing import NDArray
from safetensors.numpy import load_file
from traces import family

from colocated_rl_api import names
from colocated_rl_api.rungs import Rung, WeightVersion
from colocated_rl_api.weights import MANIFEST
from fakes.weights import logprob, read_weight

BATCH = 16 * 4
MAX_STALENESS = 1
LOOK_S = 0.5  # an export stands for a step at least, and a line for as long as its pod
APART_NATS = 1e-4  # of engine and transformers in float32; weights of two steps are up to 0.5 apart
TRAINED, LOADED, REACHED, TARGET = "step trained", "trainer loaded", "rung reached", "target accepted"
EVENTS = (TRAINED, LOADED, REACHED, TARGET)
IN_BYTES = tuple(event.encode() for event in EVENTS)
COLUMNS = ("tokens", "loss_mask", "behaviour_logp", "token_step", "group", "sample")
AGENT_COMMAND = "-m colocated_rl_agent"

LogProbabilities = Callable[[Path, NDArray[np.int32], NDArray[np.int64]], NDArray[np.float32]]
"""Returns the log-probability of each token given those before it, in nats; that of a sample's first one means nothing.

Its arguments: the folder of the weights, the tokens of all samples one after another, and the end of each sample.
"""


class LogLine(NamedTuple):
    """A line of the log of a container. source: of its pod."""

    source: str
    fields: dict[str, Any]


class RankLife(NamedTuple):
    """The life of one process of a trainer rank: all ranks start together, in a new lineage."""

    lineage: int
    rank: int


# ------------------------------------------------------------------------------------------------------------ the logs
class LogReader:
    """A LogReader reads on in the files in which the nodes keep the logs of a container of a job's pods."""

    def __init__(self, cluster: Cluster, job: RunningJob, container: str) -> None:
        self._directory = cluster.directory
        self._pattern = f"nodes/*/log/pods/{job.namespace}_{job.name}-*/{container}/*.log*"
        self._read: dict[tuple[Path, str, int], int] = {}  # bytes of each file: it is renamed when it is full
        self._paths: Sequence[Path] = ()
        self._listed_until = 0.0

    def more(self) -> list[LogLine]:
        """Return the lines of `EVENTS` since the last call, of whatever pods there are."""
        if time.monotonic() >= self._listed_until:
            self._paths = [*self._directory.glob(self._pattern)]
            self._listed_until = time.monotonic() + LOOK_S
        found = []
        for path in self._paths:
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                which = (path.parent, path.name.partition(".")[0], os.fstat(file.fileno()).st_ino)
                file.seek(self._read.get(which, 0))
                *whole, _ = file.read().split(b"\n")
                self._read[which] = self._read.get(which, 0) + sum(len(line) + 1 for line in whole)
                found += [LogLine(path.parts[-3], fields) for line in whole if (fields := read_event(line))]
        return found


def read_event(line: bytes) -> dict[str, Any] | None:
    """Read a line of a node's log: time, stream, F for a whole line, perhaps the child of the runner, and JSON."""
    if not any(event in line for event in IN_BYTES):
        return None
    text = line.decode(errors="replace").partition("{")[1:]
    try:
        fields: dict[str, Any] = json.loads("".join(text))
    except ValueError:
        return None
    return fields if fields.get("event") in EVENTS else None


def rung_of(line: LogLine) -> str | None:
    """Return the rung at which an agent stands from this line on. Of Sealed it says only that it is its target."""
    event, rung = line.fields["event"], line.fields.get("rung")
    return rung if event == REACHED or (event == TARGET and rung == Rung.SEALED) else None


# --------------------------------------------------------------------------------------------------------- the witness
class Witness:
    """A Witness keeps the logs of agents and trainer ranks, and the exports. place: of the copies of exports."""

    def __init__(self, cluster: Cluster, job: RunningJob, place: Path) -> None:
        self.cluster = cluster
        self.job = job
        self.agents: list[LogLine] = []
        self.ranks: list[LogLine] = []
        self._place = place
        self._logs = (
            (LogReader(cluster, job, names.AGENT_CONTAINER), self.agents),
            (LogReader(cluster, job, names.GPU_CONTAINER), self.ranks),
        )
        self._looking = threading.Lock()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Look again and again until the end of the block. Raises what a look raised."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(LOOK_S):
                self.look()

        with ThreadPoolExecutor(1) as executor:
            watching = executor.submit(watch)
            try:
                yield
            finally:
                over.set()
            watching.result()

    def look(self) -> None:
        with self._looking:
            for reader, lines in self._logs:
                lines += reader.more()
            self._copy_exports()

    def _copy_exports(self) -> None:
        pod = f"{names.ENV_POD_NAME}={self.job.name}-".encode()
        for agent in family(self.cluster.supervisor.pid):
            if AGENT_COMMAND not in agent.words:
                continue
            with contextlib.suppress(OSError, ValueError):  # it has ended, or an export is being written or removed
                if pod in Path(f"/proc/{agent.pid}/environ").read_bytes():
                    for export in Path(f"/proc/{agent.pid}/root{names.EXPORTS_DIR}").iterdir():
                        copy_export(export, self._place / export.name)

    @property
    def exports(self) -> dict[WeightVersion, Path]:
        whole = (path for path in self._place.iterdir() if not path.name.startswith("unfinished"))
        return {WeightVersion.parse(path.name): path for path in whole}

    def began(self, step: int) -> float:
        """Return when a rank first had trained this step or a later one, in seconds since the epoch."""
        times = (line.fields["ts"] for line in self.ranks if is_trained(line) and line.fields["step"] >= step)
        return min(times, default=float("inf"))

    def step_at(self, moment: float) -> int:
        """Return the newest step that a rank had trained by then."""
        before = (line.fields for line in self.ranks if is_trained(line) and line.fields["ts"] <= moment)
        return max((fields["step"] for fields in before), default=0)

    def rung_at(self, moment: float) -> str:
        """Return the rung that an agent had last reported by then, or "" if none had."""
        last = max(
            (line for line in self.agents if rung_of(line) and line.fields["ts"] <= moment),
            key=lambda line: float(line.fields["ts"]),
            default=None,
        )
        return (last and rung_of(last)) or ""


def is_trained(line: LogLine) -> bool:
    return bool(line.fields["event"] == TRAINED)


def copy_export(source: Path, place: Path) -> None:
    """Copy the weights of a complete export, once. Raises OSError if it is removed meanwhile."""
    manifest = source / MANIFEST
    if place.exists() or not manifest.exists():
        return
    files = {name: (source / name).read_bytes() for name in json.loads(manifest.read_bytes())["digests"]}
    unfinished = place.with_name(f"unfinished-{place.name}")
    unfinished.mkdir(exist_ok=True)
    for name, data in files.items():
        (unfinished / name).write_bytes(data)
    unfinished.rename(place)


# ---------------------------------------------------------------------------------------------- the store, the batches
@dataclass(frozen=True)
class KeptBatch:
    """A KeptBatch has the columns of `colocated_rl_api.batch` of all its shards, one after another."""

    step: int
    columns: Mapping[str, NDArray[Any]]

    @classmethod
    def read(cls, directory: Path, step: int) -> KeptBatch:
        shards = [load_file(path) for path in sorted(directory.glob(f"{step}-*.safetensors"))]
        lengths = np.cumsum([0, *(len(shard["tokens"]) for shard in shards)])
        columns = {name: np.concatenate([shard[name] for shard in shards]) for name in COLUMNS}
        columns["sample_end"] = np.concatenate(
            [shard["sample_end"] + before for shard, before in zip(shards, lengths[:-1], strict=True)]
        )
        return cls(step, columns)

    @property
    def trained(self) -> NDArray[np.bool_]:
        """Return of each token whether it is trained."""
        is_trained: NDArray[np.bool_] = self.columns["loss_mask"] == 1
        return is_trained

    @property
    def of_sample(self) -> NDArray[np.int64]:
        """Return of each token the place of its sample."""
        ends = self.columns["sample_end"]
        return np.searchsorted(ends, np.arange(ends[-1]), side="right")


@dataclass(frozen=True)
class StoredJob:
    """A StoredJob is what the volume of a job's rollout controller holds. samples: in all states, retired ones too."""

    batches: Sequence[KeptBatch]
    samples: int
    admitted: int
    failed: int

    @classmethod
    def read(cls, place: Path) -> StoredJob:
        """Read a store that may be in use."""
        with contextlib.closing(sqlite3.connect(f"file:{place}/store.sqlite3?mode=ro", uri=True, timeout=60)) as store:

            def one(query: str) -> int:
                (found,) = store.execute(query).fetchone()
                return found or 0

            store.execute("BEGIN")  # before the files: those of a batch are there before its row
            steps = [step for (step,) in store.execute("SELECT step FROM batches ORDER BY step")]
            given_up = "state IN ('failed', 'discarded')"
            samples = one("SELECT count(*) FROM samples") + one("SELECT sum(count) FROM retired")
            failed = one(f"SELECT count(*) FROM samples WHERE {given_up}")
            failed += one(f"SELECT sum(count) FROM retired WHERE {given_up}")
            admitted = one("SELECT max(id) FROM samples")
        batches = [KeptBatch.read(place / "batches", step) for step in steps]
        return cls(batches, samples=samples, admitted=admitted, failed=failed)

    @classmethod
    def of(cls, cluster: Cluster, job: RunningJob) -> StoredJob:
        claim = names.claim_name(job.name, names.JobUid(job.uid), "store")
        volume = cluster.get("pvc", claim, "-n", job.namespace)["spec"]["volumeName"]
        return cls.read(cluster.directory / "volumes" / volume)


# --------------------------------------------------------------------------------------------------------- the verdict
def assert_each_sample_once(stored: StoredJob, *, given_up: int = 0) -> None:
    """Check that every step has a whole batch, and every sample is in one state and at most in one batch.

    given_up: samples that may have failed, at most: those whose rewards were under way.
    """
    batches = stored.batches
    assert [*range(1, len(batches) + 1)] == [batch.step for batch in batches], "a batch for each step"
    samples = np.concatenate([batch.columns["sample"] for batch in batches])
    assert len(samples) == len(np.unique(samples)), "no sample is in two batches"
    for batch in batches:
        groups = np.unique(batch.columns["group"])
        assert (BATCH, BATCH // 4) == (len(batch.columns["sample"]), len(groups)), f"batch {batch.step}"
    assert stored.admitted == stored.samples, "every sample is in one state"
    assert given_up >= stored.failed, "no more samples were given up"


def assert_each_step_once(
    batches: Sequence[KeptBatch],
    ranks: Iterable[LogLine],
    agents: Iterable[LogLine],
    *,
    step: int,
    world: int,
    counts: bool = True,
) -> None:
    """Check by their own logs what each life of each rank trained, and that the agents say the same.

    step: that the job has reached. world: ranks of a lineage, at most. counts: ranks log how much they trained on.
    """
    loaded: dict[RankLife, int] = {}
    trained: defaultdict[RankLife, dict[int, Any]] = defaultdict(dict)
    for line in sorted(ranks, key=lambda line: float(line.fields["ts"])):
        life, at = life_of(line), line.fields["step"]
        if line.fields["event"] == LOADED:
            assert life not in loaded, f"{life} loaded once"
            loaded[life] = at
        elif is_trained(line):
            assert life in loaded, f"{life} loaded before it trained step {at}"
            assert loaded[life] + len(trained[life]) + 1 == at, f"{life} trains each step once, in order"
            trained[life][at] = line.fields["metrics"]
    assert {*range(world)} == {life.rank for life in trained}, "all ranks trained"
    by_lineage: defaultdict[int, dict[int, Any]] = defaultdict(dict)
    for life, steps in trained.items():
        for at, metrics in steps.items():
            assert metrics == by_lineage[life.lineage].setdefault(at, metrics), f"{life}, step {at}: as its peers"
            if counts:
                batch = batches[at - 1]
                wanted = {"samples": BATCH, "tokens": int(batch.trained.sum())}
                assert wanted == {name: metrics[name] for name in wanted}, f"{life} trained on batch {at}"
    for line in filter(is_trained, agents):
        life, at = life_of(line), line.fields["step"]  # a rank that is killed may take its last line with it
        own = trained[life].get(at)
        assert own in (None, line.fields["metrics"]), f"{life}, step {at}: as its agent says"
        assert own or at > max(trained[life], default=0), f"{life} says itself that it trained step {at}"
        by_lineage[life.lineage].setdefault(at, line.fields["metrics"])
    for life, before in loaded.items():
        known = {at for lineage, steps in by_lineage.items() if lineage < life.lineage for at in steps}
        assert before == 0 or before in known, f"{life} goes on from step {before}, which was trained before"
    assert {*range(1, step + 1)} <= {at for steps in by_lineage.values() for at in steps}, "every step was trained"


def life_of(line: LogLine) -> RankLife:
    return RankLife(line.fields["lineage"], line.fields["rank"])


def assert_versions(
    batches: Sequence[KeptBatch],
    exports: Mapping[WeightVersion, Path],
    *,
    computed: LogProbabilities,
    max_staleness: int = MAX_STALENESS,
) -> tuple[int, int]:
    """Check that each token was drawn by weights of the step that its batch names, and not by newer ones later on.

    exports: of every version, and of step 0 the model. max_staleness: that the job allows. Returns how many tokens
    there are, and how many of them no other weights that the batch may have would have drawn with this log-probability.
    """
    of_step: defaultdict[int, list[Path]] = defaultdict(list)
    for version, folder in sorted(exports.items()):
        of_step[version.step].append(folder)
    tokens = alone = 0
    for batch in batches:
        columns, trained, sample = batch.columns, batch.trained, batch.of_sample
        named, logp = columns["token_step"][trained], columns["behaviour_logp"][trained]
        allowed = range(max(0, batch.step - 1 - max_staleness), batch.step)
        assert {*named.tolist()} <= {*allowed}, f"batch {batch.step}: tokens are as old as the job allows"
        in_one = sample[trained][1:] == sample[trained][:-1]
        assert not (in_one & (named[1:] < named[:-1])).any(), f"batch {batch.step}: versions go on"
        assert ((logp <= 0) & (logp > -1e4)).all(), f"batch {batch.step}: log-probabilities"
        apart = {}
        for step in allowed:
            assert of_step[step] or step not in named, f"no complete export of step {step} was seen"
            found = [computed(folder, columns["tokens"], columns["sample_end"])[trained] for folder in of_step[step]]
            apart[step] = np.min([np.abs(each - logp) for each in found] or [np.full(len(logp), np.inf)], axis=0)
        fits = np.stack([apart[step] <= APART_NATS for step in allowed])
        for token in np.flatnonzero(~fits[named - allowed[0], np.arange(len(named))]):
            nats = {step: round(float(apart[step][token]), 6) for step in allowed}
            which = f"batch {batch.step}, sample {columns['sample'][sample[trained][token]]}"
            raise AssertionError(f"{which}: a token names step {named[token]}, and is {nats} nats from each step's")
        tokens, alone = tokens + len(named), alone + int((fits.sum(axis=0) == 1).sum())
    assert alone > 0, "weights of two steps differ"
    return tokens, alone


def by_transformers() -> LogProbabilities:
    """Return the forward pass of transformers in float32, on the weights of an export of the demo's model."""
    import torch
    from safetensors.torch import load_file as load_tensors
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)  # the job runs on beside
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()

    def computed(weights: Path, tokens: NDArray[np.int32], ends: NDArray[np.int64]) -> NDArray[np.float32]:
        state = {name: tensor for file in weights.glob("*.safetensors") for name, tensor in load_tensors(file).items()}
        assert not model.load_state_dict(state, strict=False).unexpected_keys
        samples = [torch.from_numpy(sample.astype(np.int64)) for sample in np.split(tokens, ends[:-1])]
        padded = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)
        with torch.inference_mode():
            logits = model(input_ids=padded, use_cache=False).logits[:, :-1]
        logp = torch.log_softmax(logits, dim=-1).gather(2, padded[:, 1:, None]).squeeze(2).numpy()
        rows = [np.concatenate([[0.0], row[: len(sample) - 1]]) for row, sample in zip(logp, samples, strict=True)]
        return np.concatenate(rows).astype(np.float32)

    return computed


def by_one_number(weights: Path, tokens: NDArray[np.int32], ends: NDArray[np.int64]) -> NDArray[np.float32]:
    """Compute them as the engine of the tests does."""
    weight = read_weight(weights) or 0.0
    pairs = itertools.pairwise(tokens.tolist())
    return np.array([0.0, *(logprob(weight, before, token) for before, token in pairs)], np.float32)


def judge(
    witness: Witness, *, world: int, given_up: int = 0, are_real: bool = True, max_staleness: int = MAX_STALENESS
) -> str:
    """Check a job that runs or has ended. Returns in a sentence how many tokens were computed again.

    are_real: engines and trainers are no stand-ins of the tests. The others: as above.
    """
    step = witness.job.status["step"]
    witness.look()
    ranks, agents = [*witness.ranks], [*witness.agents]
    stored = StoredJob.of(witness.cluster, witness.job)  # later: it has a batch for each of these lines
    witness.look()  # later still: an export for each token
    assert step <= len(stored.batches)
    assert_each_sample_once(stored, given_up=given_up)
    assert_each_step_once(stored.batches, ranks, agents, step=step, world=world, counts=are_real)
    exports = witness.exports | {WeightVersion(0, 0): MODEL}
    computed = by_transformers() if are_real else by_one_number
    tokens, alone = assert_versions(stored.batches, exports, computed=computed, max_staleness=max_staleness)
    return f"{step} steps, {tokens} tokens of the weights that they name, {alone} of them of no others"
