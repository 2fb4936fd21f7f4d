"""The rank server: which request has which effect when, and what an agent is told otherwise. The loop is scripted."""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from documents.openapi import trainer

from colocated_rl_api.facts import TrainerState
from colocated_rl_api.rungs import WeightVersion
from colocated_rl_api.trainer_wire import (
    ExportRequest,
    FinishRequest,
    MirrorRequest,
    SaveRequest,
    ScoreRequest,
    TrainerStatus,
    TrainRequest,
)
from colocated_rl_api.weights import MANIFEST, Probe
from colocated_rl_trainer.protocol.rank import (
    Diverged,
    NotDone,
    OffloadRequest,
    OnloadRequest,
    Rank,
    Refused,
    Request,
    Watch,
    conflict,
    holds,
)
from colocated_rl_trainer.protocol.rank_server import MAX_BODY_BYTES, RankServer
from fakes.interface import Interface

DEADLINE_S = 60.0
DOCUMENT = Interface(trainer())  # which every answer on the wire is held against
LOADED = WeightVersion(4, 2)  # what a scripted rank stands at


class ScriptedLoop:
    """Does what `script` says for each call, by name; counts calls; `reached` and `go` hold a call under way."""

    def __init__(self, **script: Callable[[], None]) -> None:
        self.script = script
        self.calls: list[str] = []
        self.loaded = 4
        self.oldest = 3
        self.figures: dict[str, Any] = {}
        self.reached = threading.Event()
        self.go = threading.Event()

    def hold(self) -> None:
        self.reached.set()
        assert self.go.wait(DEADLINE_S)

    def _call(self, name: str) -> None:
        self.calls.append(name)
        self.script.get(name, lambda: None)()

    def load(self) -> int:
        self._call("load")
        return self.loaded

    def onload(self) -> None:
        self._call("onload")

    def offload(self) -> None:
        self._call("offload")

    def train(self, step: int, shard: Path, watch: Watch) -> Mapping[str, float]:
        self._call("train")
        watch.progress()
        self._call("progressed")
        watch.mark_dirty()
        self._call("update")
        return {"step": float(step), "unmeasured": float("nan")} | self.figures

    def export(self, directory: Path) -> Probe | None:
        self._call("export")
        head = json.dumps({"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}).encode()
        (directory / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head)
        return Probe(input_ids=(1, 2), logp=(-1.0,))

    def save(self, step: int, keep: int) -> None:
        self._call("save")
        self.oldest = step - keep

    def replay_from(self) -> int:
        return self.oldest


class ScriptedScorer(ScriptedLoop):
    def score(self, step: int, shard: Path, scores: Path, watch: Watch) -> None:
        self._call("score")
        watch.progress()


class ScriptedMirror(ScriptedLoop):
    def saved(self) -> int:
        return self.loaded - 1

    def mirror(self, step: int) -> None:
        self._call("mirror")


class RunningRank:
    """A rank whose main thread is a thread of the test. `now`: its clock, by which its pace is measured."""

    def __init__(
        self,
        loop: ScriptedLoop,
        *,
        writes_weights: bool = True,
        must_score: bool = False,
        has_mirrors: bool = False,
        network_fault: Callable[[], str] = lambda: "",
    ) -> None:
        self.loop = loop
        self.now = 0.0
        self.rank = Rank(
            rank=0,
            lineage=2,
            writes_weights=writes_weights,
            must_score=must_score,
            has_mirrors=has_mirrors,
            network_fault=network_fault,
            clock=lambda: self.now,
        )
        self.ended: queue.Queue[Exception] = queue.Queue()
        self._pool = ThreadPoolExecutor()
        threading.Thread(target=self._main, daemon=True).start()

    def _main(self) -> None:
        try:
            self.rank.run(lambda: self.loop)
        except Exception as error:  # noqa: BLE001 - what ends the process is what the test looks at
            self.ended.put(error)

    def ask(self, request: Request) -> TrainerStatus:
        return self.begin(request).result(DEADLINE_S)

    def begin(self, request: Request) -> Future[TrainerStatus]:
        return self._pool.submit(self.rank.ask, request)

    def refusal(self, request: Request) -> NotDone:
        with pytest.raises(NotDone) as refused:
            self.ask(request)
        return refused.value

    def loaded(self) -> RunningRank:
        deadline = time.monotonic() + DEADLINE_S
        while self.rank.status.state is TrainerState.STARTING:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return self


def rank(**script: Callable[[], None]) -> RunningRank:
    return RunningRank(ScriptedLoop(**script)).loaded()


def test_a_step_that_stands_still_is_told_with_where_it_stands() -> None:
    running = onloaded()
    running.ask(TrainRequest(step=5, shard="a"))
    running.loop.script["progressed"] = running.loop.hold
    step = running.begin(TrainRequest(step=6, shard="a"))
    assert running.loop.reached.wait(DEADLINE_S)
    assert running.rank.report().standstill is None
    running.now += 200.0
    found = running.rank.report().standstill
    assert found is not None
    assert (200.0, 0.0, 1) == (found.seconds, found.usual_s, found.moved)
    assert "hold (test_trainer_rank_server.py:" in found.where
    running.loop.go.set()
    step.result(DEADLINE_S)
    assert running.rank.report().standstill is None


def onloaded(**script: Callable[[], None]) -> RunningRank:
    running = rank(**script)
    running.ask(OnloadRequest())
    return running


def train(step: int = 5) -> TrainRequest:
    return TrainRequest(step=step, shard="/batches/5.safetensors")


def export(directory: Path, version: WeightVersion = LOADED) -> ExportRequest:
    return ExportRequest(version=version, directory=str(directory))


def finish(export: Path, directory: Path, version: WeightVersion = LOADED) -> FinishRequest:
    return FinishRequest(version=version, export=str(export), directory=str(directory))


# ------------------------------------------------------------------------------------------------- what a request does
def test_loaded_rank_is_offloaded_at_the_step_of_its_checkpoint() -> None:
    status = rank().rank.status

    assert (TrainerState.OFFLOADED, 4, 4, None, False) == (
        status.state, status.step, status.saved, status.exported, status.dirty,
    )  # fmt: skip


def test_step_is_trained_once_however_often_it_is_asked_for() -> None:
    running = onloaded()

    first = running.ask(train())
    again = running.ask(train())

    assert (5, TrainerState.ONLOADED, False) == (first.step, first.state, first.dirty)
    assert first == again
    assert 1 == running.loop.calls.count("train")


def test_finished_step_is_answered_also_when_offloaded() -> None:
    running = onloaded()
    running.ask(train())
    running.ask(OffloadRequest())

    assert {"step": 5.0} == running.ask(train()).metrics


def test_request_that_is_under_way_is_joined() -> None:
    running = onloaded()
    running.loop.script["train"] = running.loop.hold

    first, second = running.begin(train()), running.begin(train())
    assert running.loop.reached.wait(DEADLINE_S)
    assert TrainerState.TRAINING is running.rank.status.state
    running.loop.go.set()

    assert [5, 5] == [asked.result(DEADLINE_S).step for asked in (first, second)]
    assert 1 == running.loop.calls.count("train")


def test_other_request_is_refused_while_one_is_under_way() -> None:
    running = onloaded()
    running.loop.script["train"] = running.loop.hold
    running.begin(train())
    assert running.loop.reached.wait(DEADLINE_S)

    refused = running.refusal(OffloadRequest())
    running.loop.go.set()

    assert (409, "Busy") == (refused.code, refused.body.error)
    assert "train is under way" in refused.body.message


def test_finished_effect_is_answered_while_something_else_is_under_way(tmp_path: Path) -> None:
    running = onloaded()
    running.ask(train())
    running.loop.script["export"] = running.loop.hold
    running.begin(export(tmp_path / "e", WeightVersion(5, 2)))
    assert running.loop.reached.wait(DEADLINE_S)

    assert 5 == running.ask(train()).step
    running.loop.go.set()


def test_onload_does_not_trust_a_state_that_is_being_left() -> None:
    running = onloaded()
    running.loop.script["offload"] = running.loop.hold
    running.begin(OffloadRequest())
    assert running.loop.reached.wait(DEADLINE_S)

    refused = running.refusal(OnloadRequest())
    running.loop.go.set()

    assert "Busy" == refused.body.error


def test_dirty_from_the_first_optimizer_call_to_the_end_of_the_step() -> None:
    seen: list[bool] = []
    running = onloaded()
    running.loop.script |= {
        "train": lambda: seen.append(running.rank.status.dirty),
        "update": lambda: seen.append(running.rank.status.dirty),
    }

    seen.append(running.ask(train()).dirty)

    assert [False, True, False] == seen


def test_progress_rises_while_a_step_goes_on() -> None:
    """It stood still during a step, so that a long one was taken for a hanging one."""
    seen: list[int] = []
    running = onloaded()
    running.loop.script |= {
        "train": lambda: seen.append(running.rank.status.progress),
        "progressed": lambda: seen.append(running.rank.status.progress),
    }

    running.ask(train())

    assert seen[0] < seen[1]


def test_metric_that_is_no_number_is_left_out() -> None:
    assert {"step": 5.0} == onloaded().ask(train()).metrics


@pytest.mark.parametrize(("value", "kind"), [("high", "str"), ([0.5, 1.5], "list")])
def test_figure_that_is_none_is_named(value: object, kind: str) -> None:
    """The message named the type, and not which figure it was."""
    running = onloaded()
    running.loop.figures = {"reward": value}

    assert f"train returned reward, a {kind}, which is no figure" in running.refusal(train()).body.message


@pytest.mark.parametrize("returned", [None, "4", 4.0])
@pytest.mark.parametrize(("method", "attribute"), [("load", "loaded"), ("replay_from", "oldest")])
def test_step_that_is_none_ends_the_rank_and_is_named(method: str, attribute: str, returned: object) -> None:
    """The rank went on: with "4" no request for a step was answered, with None none could be done."""
    loop = ScriptedLoop()
    setattr(loop, attribute, returned)

    ended = RunningRank(loop).ended.get(timeout=DEADLINE_S)

    assert f"{method} returned a {type(returned).__name__}, and not a step: an integer" == str(ended)


def test_step_of_numpy_is_one() -> None:
    loop = ScriptedLoop()
    loop.loaded = np.int64(4)  # type: ignore[assignment]

    assert '"step":4,' in RunningRank(loop).loaded().rank.status.model_dump_json()


def test_export_is_whole_when_it_is_answered(tmp_path: Path) -> None:
    running = onloaded()

    status = running.ask(export(tmp_path / "4-2"))
    running.ask(export(tmp_path / "4-2"))

    assert WeightVersion(4, 2) == status.exported
    assert {MANIFEST, "model.safetensors"} == {file.name for file in (tmp_path / "4-2").iterdir()}
    assert 1 == running.loop.calls.count("export")


def test_torn_export_is_written_anew(tmp_path: Path) -> None:
    (tmp_path / "4-2").mkdir()
    (tmp_path / "4-2" / "left.safetensors").write_bytes(b"half")

    onloaded().ask(export(tmp_path / "4-2"))

    assert {MANIFEST, "model.safetensors"} == {file.name for file in (tmp_path / "4-2").iterdir()}


def test_export_that_was_removed_is_written_again(tmp_path: Path) -> None:
    running = onloaded()
    running.ask(export(tmp_path / "4-2"))
    (tmp_path / "4-2" / MANIFEST).unlink()

    running.ask(export(tmp_path / "4-2"))

    assert (tmp_path / "4-2" / MANIFEST).exists()


# ---------------------------------------------------------------------------------------------------- with a reference
def with_reference(**script: Callable[[], None]) -> RunningRank:
    running = RunningRank(ScriptedScorer(**script), must_score=True).loaded()
    running.ask(OnloadRequest())
    return running


def score(step: int = 5) -> ScoreRequest:
    return ScoreRequest(step=step, shard="/batches/5.safetensors", scores="/batches/5.scores")


def test_batch_is_scored_once_however_often_it_is_asked_for_and_then_trained() -> None:
    running = with_reference()

    first, again = running.ask(score()), running.ask(score())

    assert (4, 5, TrainerState.ONLOADED, False) == (first.step, first.scored, first.state, first.dirty)
    assert first == again
    assert (5, 5) == ((trained := running.ask(train())).step, trained.scored)
    assert ["score", "train"] == [call for call in running.loop.calls if call in ("score", "train")]


def test_batch_that_is_not_scored_is_not_trained() -> None:
    running = with_reference()
    refused = running.refusal(train())

    assert (409, "NotScored") == (refused.code, refused.body.error)
    running.ask(score())
    running.ask(train())
    assert "NotScored" == running.refusal(train(6)).body.error, "the scores were of the batch before"


def test_what_scores_says_so_while_it_does() -> None:
    running = with_reference()
    running.loop.script["score"] = running.loop.hold
    asked = running.begin(score())
    assert running.loop.reached.wait(DEADLINE_S)
    assert TrainerState.SCORING is running.rank.status.state
    assert "score is under way" in running.refusal(train()).body.message
    running.loop.go.set()
    assert 5 == asked.result(DEADLINE_S).scored


def test_refused_scores_change_nothing_and_a_full_disk_is_named() -> None:
    running = with_reference()

    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    running.loop.script["score"] = full
    refused = running.refusal(score())
    running.loop.script.clear()

    assert (503, "Refused") == (refused.code, refused.body.error)
    assert "scores not written" in refused.body.message
    assert "ephemeral storage" in refused.body.message
    assert TrainerState.ONLOADED is running.rank.status.state
    assert 5 == running.ask(score()).scored


def test_whether_a_loop_can_score_is_reported_once_it_is_there() -> None:
    assert RunningRank(ScriptedScorer()).loaded().rank.status.can_score
    assert not rank().rank.status.can_score


@pytest.mark.parametrize(
    "running",
    [lambda: RunningRank(ScriptedScorer()), lambda: RunningRank(ScriptedLoop(), must_score=True)],
    ids=["no reference in the job", "no score in the loop"],
)
def test_nothing_is_scored_without_a_reference(running: Callable[[], RunningRank]) -> None:
    it = running().loaded()
    it.ask(OnloadRequest())
    refused = it.refusal(score())

    assert (409, "NoReference") == (refused.code, refused.body.error)
    assert "score" not in it.loop.calls


# ------------------------------------------------------------------------------------------------------ what fails how
def test_nothing_can_be_asked_before_the_checkpoint_is_loaded() -> None:
    loop = ScriptedLoop()
    loop.script["load"] = loop.hold
    running = RunningRank(loop)
    assert loop.reached.wait(DEADLINE_S)

    refused = running.refusal(OnloadRequest())
    loop.go.set()

    assert (409, "Starting") == (refused.code, refused.body.error)


def test_refused_step_changes_nothing_and_can_be_asked_for_again() -> None:
    running = onloaded()

    def refuse() -> None:
        raise Refused("shard is torn: fetch it again")

    running.loop.script["train"] = refuse
    refused = running.refusal(train())
    after = running.rank.status
    running.loop.script.clear()

    assert (503, "Refused", "shard is torn: fetch it again") == (
        refused.code, refused.body.error, refused.body.message,
    )  # fmt: skip
    assert (4, TrainerState.ONLOADED, False) == (after.step, after.state, after.dirty)
    assert 5 == running.ask(train()).step


@pytest.mark.parametrize("call", ["onload", "offload", "train", "update", "export", "save"])
def test_any_other_failure_is_answered_and_ends_the_rank(call: str, tmp_path: Path) -> None:
    running = onloaded() if call != "onload" else rank()

    def fail() -> None:
        raise RuntimeError("out of memory")

    running.loop.script[call] = fail
    requests: dict[str, Request] = {
        "onload": OnloadRequest(), "offload": OffloadRequest(), "train": train(), "update": train(),
        "export": export(tmp_path / "e"), "save": SaveRequest(step=5, keep=1),
    }  # fmt: skip
    if call == "save":
        running.ask(train())

    refused = running.refusal(requests[call])

    assert (500, "Failed") == (refused.code, refused.body.error)
    assert refused.body.message.startswith(f"RuntimeError at {__file__}:{fail.__code__.co_firstlineno + 1}, called at ")
    assert refused.body.message.endswith("; this rank ends")
    assert "out of memory" not in refused.body.message, "its words may quote a batch"
    assert isinstance(running.ended.get(timeout=DEADLINE_S), RuntimeError)


def test_a_step_that_would_fail_again_is_told_with_its_message_and_ends_the_rank() -> None:
    running = onloaded()

    def diverge() -> None:
        raise Diverged("the gradient is nan: lower learningRate")

    running.loop.script["train"] = diverge
    refused = running.refusal(train())

    assert (500, "NotRetriable", "the gradient is nan: lower learningRate") == (
        refused.code, refused.body.error, refused.body.message,
    )  # fmt: skip
    assert isinstance(running.ended.get(timeout=DEADLINE_S), Diverged)


def test_refusal_after_an_update_is_a_failure() -> None:
    running = onloaded()

    def refuse() -> None:
        raise Refused("too late")

    running.loop.script["update"] = refuse

    assert "Failed" == running.refusal(train()).body.error
    assert isinstance(running.ended.get(timeout=DEADLINE_S), Refused)


def test_full_volume_is_named_with_what_to_change_and_the_rank_goes_on(tmp_path: Path) -> None:
    running = onloaded()

    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    running.loop.script["export"] = full
    refused = running.refusal(export(tmp_path / "e"))
    running.loop.script.clear()

    assert "spec.weightSync.sizeLimit" in refused.body.message
    assert WeightVersion(4, 2) == running.ask(export(tmp_path / "e")).exported


def test_export_without_a_place_ends_the_rank_because_peers_wait_for_it_in_the_loop(tmp_path: Path) -> None:
    """It was refused before the loop was asked, whose other ranks then waited for this one's part of the weights."""
    running = onloaded()
    (tmp_path / "file").touch()

    refused = running.refusal(export(tmp_path / "file" / "e"))

    assert (500, "Failed") == (refused.code, refused.body.error)
    assert isinstance(running.ended.get(timeout=DEADLINE_S), OSError)
    assert "export" not in running.loop.calls


def test_checkpoint_without_room_is_refused_and_can_be_asked_for_again() -> None:
    running = onloaded()
    running.ask(train())

    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    running.loop.script["save"] = full
    refused = running.refusal(SaveRequest(step=5, keep=1))
    after = running.rank.status
    running.loop.script.clear()

    assert (503, "Refused") == (refused.code, refused.body.error)
    assert "checkpoint not written: [Errno 28] No space left on device: expand the claim" in refused.body.message
    assert (5, 4, TrainerState.ONLOADED) == (after.step, after.saved, after.state)
    assert 5 == running.ask(SaveRequest(step=5, keep=1)).saved


def test_rank_leaves_its_export_as_the_model_while_offloaded(tmp_path: Path) -> None:
    running = onloaded()
    running.ask(export(tmp_path / "e"))
    running.ask(OffloadRequest())
    assert running.rank.status.can_finish

    request = finish(tmp_path / "e", tmp_path / "model")
    first = running.ask(request)
    (tmp_path / "e" / MANIFEST).unlink()

    assert LOADED == first.finished
    assert (tmp_path / "model" / MANIFEST).is_file()
    assert first == running.ask(request), "it is not written again"


def test_model_that_can_not_be_left_is_refused_and_the_rank_goes_on(tmp_path: Path) -> None:
    running = onloaded()
    running.ask(export(tmp_path / "e"))
    (tmp_path / "file").touch()

    refused = running.refusal(finish(tmp_path / "e", tmp_path / "file" / "model"))
    torn = running.refusal(finish(tmp_path / "no-such", tmp_path / "model"))

    assert (503, 503) == (refused.code, torn.code)
    assert "model not written: [Errno 17] File exists" in refused.body.message
    assert "model not left: no export to leave" in torn.body.message
    assert running.ask(finish(tmp_path / "e", tmp_path / "model")).finished == LOADED


STANDS = TrainerStatus(state=TrainerState.ONLOADED, rank=1, lineage=2, step=4, saved=4)
OFF = STANDS.model_copy(update={"state": TrainerState.OFFLOADED})


@pytest.mark.parametrize(
    ("status", "request_", "error"),
    [
        (OFF, OnloadRequest(), None),
        (STANDS, OffloadRequest(), None),
        (STANDS, train(5), None),
        (OFF, train(5), "NotOnloaded"),
        (STANDS, train(6), "WrongStep"),
        (STANDS, train(3), "WrongStep"),
        (STANDS, export(Path("/w/4-2")), None),
        (OFF, export(Path("/w/4-2")), "NotOnloaded"),
        (STANDS, export(Path("/w/5-2"), WeightVersion(5, 2)), "WrongVersion"),
        (STANDS, export(Path("/w/4-1"), WeightVersion(4, 1)), "WrongVersion"),
        (OFF, SaveRequest(step=5, keep=1), "WrongStep"),
        (STANDS.model_copy(update={"step": 5}), SaveRequest(step=5, keep=1), None),
        (OFF, finish(Path("/w/4-2"), Path("/c")), None),
        (OFF, finish(Path("/w/3-2"), Path("/c"), WeightVersion(3, 2)), "WrongVersion"),
        (OFF, finish(Path("/w/4-1"), Path("/c"), WeightVersion(4, 1)), "WrongVersion"),
        (OFF.model_copy(update={"saved": 3}), finish(Path("/w/4-2"), Path("/c")), "NotSaved"),
    ],
)
def test_what_can_be_done_from_where(status: TrainerStatus, request_: Request, error: str | None) -> None:
    assert not holds(status, request_)
    refused = conflict(status, request_)
    assert error == (refused.error if refused else None)


def test_rank_says_how_far_back_a_restart_may_go() -> None:
    running = onloaded()
    loaded = running.rank.status
    running.ask(train())

    saved = running.ask(SaveRequest(step=5, keep=2))

    assert [(4, 3), (5, 3)] == [(loaded.saved, loaded.replay_from), (saved.saved, saved.replay_from)]


def test_rank_says_what_is_wrong_with_its_network_once_it_has_loaded_and_after_each_step() -> None:
    """NCCL chooses at the first collective of devices, which may be in a step."""
    faults = iter(["locked memory is limited", "NCCL takes TCP", ""])
    running = RunningRank(ScriptedLoop(), network_fault=lambda: next(faults)).loaded()
    loaded = running.ask(OnloadRequest())
    assert "locked memory is limited" == loaded.network_fault
    assert ["NCCL takes TCP", ""] == [running.ask(train(step)).network_fault for step in (5, 6)]


@pytest.mark.parametrize(("has_mirrors", "loop"), [(False, ScriptedMirror()), (True, ScriptedLoop())])
def test_a_loop_is_not_asked_to_keep_a_step_in_memory_that_the_job_or_it_has_no_place_for(
    has_mirrors: bool, loop: ScriptedLoop
) -> None:
    running = RunningRank(loop, has_mirrors=has_mirrors).loaded()
    assert not running.rank.status.can_mirror
    assert "NoMirrors" == running.refusal(MirrorRequest(step=4)).body.error


def test_a_step_is_kept_in_memory_once_and_its_loop_says_which_checkpoint_is_the_newest() -> None:
    running = RunningRank(ScriptedMirror(), has_mirrors=True).loaded()
    loaded = running.rank.status
    assert (4, 3, True, None) == (loaded.step, loaded.saved, loaded.can_mirror, loaded.mirrored)
    assert "WrongStep" == running.refusal(MirrorRequest(step=3)).body.error
    for _ in range(2):
        kept = running.ask(MirrorRequest(step=4))
        assert (4, "", 3) == (kept.mirrored, kept.mirror_fault, kept.saved)
    assert 1 == running.loop.calls.count("mirror")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "spec.checkpoint.inMemory.sizeLimit"),
        (Refused("rank 1: No space left on device"), "rank 1: No space left on device"),
    ],
)
def test_a_step_that_memory_has_no_room_for_counts_as_kept_with_the_reason(error: Exception, words: str) -> None:
    """The next step would otherwise wait for it, and the ranks of other pods for this one."""

    def fail() -> None:
        raise error

    running = RunningRank(ScriptedMirror(mirror=fail), has_mirrors=True).loaded()
    found = running.ask(MirrorRequest(step=4))
    assert 4 == found.mirrored
    assert words in found.mirror_fault


@pytest.mark.parametrize("step", [3, 4])
def test_checkpoint_that_is_durable_is_not_written_again(step: int) -> None:
    assert holds(STANDS, SaveRequest(step=step, keep=1))


# --------------------------------------------------------------------------------------------------------- on the wire
@pytest.fixture
def at(tmp_path: Path) -> Iterator[Path]:
    """Socket of an onloaded rank."""
    path = tmp_path / "trainer-0.sock"
    path.write_text("left by an earlier process")
    server = RankServer(path, onloaded().rank)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield path
    server.shutdown()
    thread.join(DEADLINE_S)
    server.server_close()


def test_state_is_answered_in_the_protocols_words(at: Path) -> None:
    code, body = _ask(at, "GET", "/v1/state")

    assert 200 == code
    assert ("Onloaded", 4, 1) == (body["state"], body["step"], body["protocol"])


def test_socket_is_for_owner_and_group(at: Path) -> None:
    assert 0o660 == at.stat().st_mode & 0o777


def test_several_requests_fit_one_connection(at: Path) -> None:
    with contextlib.closing(_connection(at)) as connection:
        for path in ("/v1/onload", "/v1/offload", "/v1/nothing", "/v1/onload"):
            connection.request("POST", path, "{}")
            answer = connection.getresponse()
            json.loads(answer.read())

    assert 200 == answer.status


@pytest.mark.parametrize(
    ("method", "path", "body", "code", "error"),
    [
        ("GET", "/v1/train", None, 404, "NotFound"),
        ("POST", "/v1/value", "{}", 404, "NotFound"),
        ("POST", "/v1/score", "{}", 400, "BadRequest"),
        ("POST", "/v1/state", "{}", 404, "NotFound"),
        ("DELETE", "/v1/state", None, 501, "NotImplemented"),
        ("POST", "/v1/train", "{", 400, "BadRequest"),
        ("POST", "/v1/train", '{"step": "five"}', 400, "BadRequest"),
        ("POST", "/v1/export", '{"version": "default", "directory": "/w"}', 400, "BadRequest"),
        ("POST", "/v1/train", '{"step": 9, "shard": "/b"}', 409, "WrongStep"),
        ("POST", "/v1/train", " " * (MAX_BODY_BYTES + 1), 400, "BadRequest"),
    ],
)
def test_bad_request_is_distinguished(
    at: Path, method: str, path: str, body: str | None, code: int, error: str
) -> None:
    answer, content = _ask(at, method, path, body)

    assert (code, error) == (answer, content["error"])
    assert content["message"]


@pytest.mark.parametrize("size", ["\xb2", "-1", "9" * 5000])
def test_length_that_is_no_number_is_refused(at: Path, size: str) -> None:
    """A superscript two counts as a digit, and is no number: the connection broke off without an answer."""
    with contextlib.closing(_connection(at)) as connection:
        connection.putrequest("POST", "/v1/onload")
        connection.putheader("Content-Length", size.encode("latin-1"))
        connection.endheaders()
        answer = connection.getresponse()
        assert (400, "BadRequest") == (answer.status, json.loads(answer.read())["error"])


def _connection(path: Path) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.sock.settimeout(DEADLINE_S)
    connection.sock.connect(str(path))
    return connection


def _ask(path: Path, method: str, route: str, body: str | None = None) -> tuple[int, Any]:
    with contextlib.closing(_connection(path)) as connection:
        with contextlib.suppress(BrokenPipeError):  # a body that is too large is refused before it is read
            connection.request(method, route, body)
        answer = connection.getresponse()
        text = answer.read()
        if (method, route) in DOCUMENT.routes:
            DOCUMENT.check(method, route, answer.status, answer.headers.get_content_type(), text)
        return answer.status, json.loads(text)
