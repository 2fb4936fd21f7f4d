"""Checkpoints are there whole or not at all, and only what verifies is used."""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from full_disk import no_file_above

from colocated_rl_api.checkpoint import CONTENTS, Contents, checkpoint_name
from colocated_rl_api.names import PromptPosition
from colocated_rl_trainer.protocol.settings import ConfigError
from colocated_rl_trainer.state.checkpoint import (
    Checkpoints,
    Former,
    NoneLeft,
    Superseded,
)


def test_no_checkpoint_in_an_empty_or_absent_directory(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path, lineage=1, keep=2).newest() is None
    assert Checkpoints(tmp_path / "absent", lineage=1, keep=2).newest() is None


def test_newest_is_found_with_what_was_written(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, lineage=1, keep=2)
    _write(checkpoints, 9)
    _write(checkpoints, 10)

    newest = checkpoints.newest()

    assert newest is not None
    assert (10, "weights of 10") == (newest.step, (newest.directory / "model").read_text())


def test_only_the_newest_are_kept_and_nothing_else_is_touched(tmp_path: Path) -> None:
    (tmp_path / "step-1").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    for step in (5, 10, 15):
        _write(Checkpoints(tmp_path, lineage=1, keep=2), step, keep=2)

    assert ["notes.txt", "step-00000010", "step-00000015", "step-1"] == _names(tmp_path)


@pytest.mark.parametrize("harm", ["changed", "file gone", "contents gone", "contents torn", "renamed"])
def test_checkpoint_that_does_not_verify_is_passed_over(tmp_path: Path, harm: str) -> None:
    checkpoints = Checkpoints(tmp_path, lineage=1, keep=2)
    _write(checkpoints, 5)
    newer = _write(checkpoints, 10)
    match harm:
        case "changed":
            (newer / "model").write_text("weights of 11")
        case "file gone":
            (newer / "model").unlink()
        case "contents gone":
            (newer / CONTENTS).unlink()
        case "contents torn":
            (newer / CONTENTS).write_text((newer / CONTENTS).read_text()[:20])
        case _:
            newer.rename(tmp_path / "step-00000012")

    newest = checkpoints.newest()

    assert newest is not None
    assert 5 == newest.step


def test_full_volume_leaves_the_older_ones_and_no_half_of_the_new_one(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, lineage=1, keep=2)
    _write(checkpoints, 5, keep=1)

    def fill(directory: Path) -> None:
        (directory / "model").write_bytes(bytes(9000))

    with no_file_above(8000), pytest.raises(OSError, match="File too large"):
        checkpoints.write(10, keep=1, fill=fill)
    after_failure, names = checkpoints.newest(), _names(tmp_path)
    checkpoints.write(10, keep=1, fill=fill)

    assert after_failure is not None
    assert (5, ["step-00000005"]) == (after_failure.step, names)
    assert ["step-00000010"] == _names(tmp_path)


def test_damaged_newer_checkpoint_goes_when_its_past_is_written_again(tmp_path: Path) -> None:
    """A damaged checkpoint counted among the kept ones: the good one was removed in its place."""
    checkpoints = Checkpoints(tmp_path, lineage=1, keep=2)
    _write(checkpoints, 10, keep=1)
    damaged = _write(checkpoints, 20, keep=2)
    (damaged / "model").unlink()

    _write(checkpoints, 15, keep=1)

    assert ["step-00000015"] == _names(tmp_path)


@pytest.mark.parametrize(
    ("keep", "oldest"), [(1, [0, 10, 20, 30]), (2, [0, 0, 10, 20]), (3, [0, 0, 0, 10]), (9, [0, 0, 0, 0])]
)
def test_oldest_is_the_model_until_enough_checkpoints_are_there(tmp_path: Path, keep: int, oldest: list[int]) -> None:
    """Batches up to the newest one were thrown away, also those that a step back to an older one would need."""
    checkpoints = Checkpoints(tmp_path, lineage=1, keep=keep)
    found = [checkpoints.oldest()]
    for step in (10, 20, 30):
        _write(checkpoints, step, keep=keep)
        found.append(checkpoints.oldest())

    assert oldest == found
    assert oldest[-1] == Checkpoints(tmp_path, lineage=2, keep=keep).oldest()


def test_damaged_checkpoint_is_no_reason_to_throw_more_batches_away(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, lineage=1, keep=2)
    _write(checkpoints, 10)
    (_write(checkpoints, 20) / "model").unlink()

    newest = checkpoints.newest()

    assert newest is not None
    assert (10, 10) == (newest.step, checkpoints.oldest())


def test_first_checkpoint_that_is_damaged_leads_back_to_the_model(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, lineage=1, keep=2)
    (_write(checkpoints, 10) / "model").unlink()

    assert checkpoints.newest() is None
    assert 0 == checkpoints.oldest()


def test_model_is_not_gone_back_to_when_its_batches_are_gone(tmp_path: Path) -> None:
    """It was: the job stood at step 0 and waited for ever for the batch of step 1."""
    checkpoints = Checkpoints(tmp_path, lineage=1, keep=2)
    for step in (10, 20):
        (_write(checkpoints, step) / "model").unlink()

    with pytest.raises(NoneLeft, match=r"batches up to step 10 are gone: restore one from a backup, or make a new job"):
        checkpoints.newest()


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 3), (2, 9)])
def test_a_larger_number_to_keep_brings_no_batches_back(tmp_path: Path, before: int, after: int) -> None:
    """The trainers began again with the model, and waited for the batch of step 1, which was gone."""
    for step in (10, 20, 30, 40):
        _write(Checkpoints(tmp_path, lineage=1, keep=before), step, keep=before)
    oldest = Checkpoints(tmp_path, lineage=1, keep=before).oldest()
    later = Checkpoints(tmp_path, lineage=2, keep=after)
    assert oldest == later.oldest()
    for directory in tmp_path.iterdir():
        (directory / "model").unlink()

    with pytest.raises(NoneLeft, match=f"batches up to step {oldest} are gone"):
        later.newest()

    assert oldest <= Checkpoints(tmp_path, lineage=2, keep=1).oldest()


@pytest.mark.parametrize("refused", ["rmtree", "rename"])
def test_one_that_can_not_be_removed_costs_room_and_no_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """The newer one counted as not written, was written again and again, and the job stood meanwhile."""

    rename = Path.rename

    def refuse(path: Path, *to: Path) -> Path:
        if refused == "rename" and not path.name.startswith("step-"):
            return rename(path, *to)
        raise PermissionError(errno.EPERM, "owned by somebody else")

    _write(Checkpoints(tmp_path, lineage=1, keep=1), 10, keep=1)
    (tmp_path / ".step-00000015-1.draft").mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(*((shutil, "rmtree", refuse) if refused == "rmtree" else (Path, "rename", refuse)))
        checkpoints = Checkpoints(tmp_path, lineage=1, keep=1)
        assert checkpoint_name(20) == _write(checkpoints, 20, keep=1).name
        newest = checkpoints.newest()
    assert newest is not None
    assert 20 == newest.step == checkpoints.oldest()

    _write(checkpoints, 30, keep=1)
    assert ["step-00000030"] == _names(tmp_path)


def test_step_that_was_passed_over_can_be_written_again(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, lineage=1, keep=2)
    (_write(checkpoints, 10) / "model").write_text("damaged")

    _write(checkpoints, 10)

    newest = checkpoints.newest()
    assert newest is not None
    assert "weights of 10" == (newest.directory / "model").read_text()


def test_trainers_that_the_job_went_on_without_write_and_remove_nothing(tmp_path: Path) -> None:
    """Cut off in a save, they finished it later: what their successors had saved since was removed as a later step."""
    cut_off, successors = Checkpoints(tmp_path, lineage=1, keep=2), Checkpoints(tmp_path, lineage=2, keep=2)

    def fill_slowly(directory: Path) -> None:
        (directory / "model").write_text("of lineage 1")
        _write(successors, 10)
        _write(successors, 20)
        directory.mkdir(exist_ok=True)  # its own was tidied away
        (directory / "optimizer").write_text("of lineage 1")

    with pytest.raises(Superseded, match=r"is of lineage 2, these trainers are of 1"):
        cut_off.write(10, keep=1, fill=fill_slowly)
    with pytest.raises(Superseded):
        _write(cut_off, 30)

    newest = successors.newest()
    assert newest is not None
    assert (20, "weights of 20") == (newest.step, (newest.directory / "model").read_text())
    assert {"step-00000010", "step-00000020"} == {name for name in _names(tmp_path) if not name.startswith(".")}


def test_trainers_that_were_cut_off_leave_what_their_successors_are_writing(tmp_path: Path) -> None:
    """Their successors' first checkpoint is not there yet, so nothing says that they are superseded."""
    cut_off, successors = Checkpoints(tmp_path, lineage=1, keep=2), Checkpoints(tmp_path, lineage=2, keep=2)
    draft = successors.begin(10)
    (draft / "model").write_text("of lineage 2")

    _write(cut_off, 10)
    successors.finish(draft, 10, keep=2)

    newest = successors.newest()
    assert newest is not None
    assert "of lineage 2" == (newest.directory / "model").read_text()


def _write(checkpoints: Checkpoints, step: int, *, keep: int = 2) -> Path:
    def fill(directory: Path) -> None:
        (directory / "model").write_text(f"weights of {step}")

    return checkpoints.write(step, keep=keep, fill=fill).directory


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_milestones_are_kept_and_never_gone_back_to(tmp_path: Path) -> None:
    """Batches since a milestone are gone: a job that went back to one could not go on from it."""
    checkpoints = Checkpoints(tmp_path, lineage=1, keep=2, milestone_every=20)
    written = {step: _write(checkpoints, step) for step in (10, 20, 30, 40, 50)}

    assert ["step-00000020", "step-00000040", "step-00000050"] == _names(tmp_path)
    assert 40 == checkpoints.oldest()
    for step in (50, 40):
        (written[step] / "model").write_text("damaged")
    with pytest.raises(NoneLeft, match="up to step 40 are gone"):
        checkpoints.newest()


def test_a_step_that_is_done_again_takes_the_place_of_later_milestones_too(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, lineage=1, keep=2, milestone_every=10)
    for step in (10, 20, 30):
        _write(checkpoints, step)

    _write(checkpoints, 20)

    assert ["step-00000010", "step-00000020"] == _names(tmp_path)


@pytest.mark.parametrize("damaged", ["a", "b", "c", None])
def test_each_file_is_verified_by_one_rank_and_all_ranks_agree(tmp_path: Path, damaged: str | None) -> None:
    def fill(directory: Path) -> None:
        for name in "abc":
            (directory / name).write_text(name)

    for step in (5, 10):
        newest = Checkpoints(tmp_path, lineage=1, keep=2).write(step, keep=2, fill=fill).directory
    if damaged:
        (newest / damaged).write_text("damaged")
    barrier, items = threading.Barrier(2), [None, None]
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(
            lambda rank: Checkpoints(tmp_path, lineage=1, keep=2).newest(InThreads(rank, barrier, items)), range(2)
        )

    assert [5 if damaged else 10] * 2 == [saved.step for saved in found if saved]


class InThreads:
    """A rank of two in one process. items: what each has to say, which all read once all have written."""

    size = 2

    def __init__(self, rank: int, barrier: threading.Barrier, items: list[Any]) -> None:
        self.rank, self._barrier, self._items = rank, barrier, items

    def each(self, do: Callable[[], Any]) -> list[Any]:
        self._items[self.rank] = do()
        self._barrier.wait(10)
        lines = [*self._items]
        self._barrier.wait(10)
        return lines

    def led(self, do: Callable[[], Any]) -> Any:
        return self.each(do if self.rank == 0 else lambda: None)[0]


# ------------------------------------------------------------------------------------- beginning from another job's
def test_a_former_checkpoint_takes_the_place_of_the_model(tmp_path: Path) -> None:
    former, own = _former(tmp_path, 20, 40)
    checkpoints = Checkpoints(own, lineage=1, keep=2, former=Former(former))

    begun = checkpoints.newest()
    floors = [checkpoints.oldest()]
    for step in (50, 60, 70):
        _write(checkpoints, step)
        floors.append(checkpoints.oldest())

    assert begun is not None
    assert (40, former / "step-00000040") == (begun.step, begun.directory)
    assert [40, 40, 50, 60] == floors
    assert ["step-00000020", "step-00000040"] == _names(former), "it is only read"


def test_a_restart_begins_from_the_same_one_whatever_the_former_job_has_written_since(tmp_path: Path) -> None:
    former, own = _former(tmp_path, 20)
    Checkpoints(own, lineage=1, keep=2, former=Former(former)).newest()
    _write(Checkpoints(former, lineage=9, keep=9), 30, keep=9)

    again = Checkpoints(own, lineage=2, keep=2, former=Former(former)).newest()

    assert again is not None
    assert 20 == again.step


def test_own_checkpoints_come_before_the_former_ones_also_when_those_are_gone(tmp_path: Path) -> None:
    former, own = _former(tmp_path, 20)
    checkpoints = Checkpoints(own, lineage=1, keep=2, former=Former(former))
    checkpoints.newest()
    _write(checkpoints, 30)
    (former / "step-00000020").rename(former / "gone")

    newest = Checkpoints(own, lineage=2, keep=2, former=Former(former)).newest()

    assert newest is not None
    assert (30, own) == (newest.step, newest.directory.parent)


def test_damaged_own_checkpoint_is_made_up_for_from_the_former_one(tmp_path: Path) -> None:
    former, own = _former(tmp_path, 20)
    checkpoints = Checkpoints(own, lineage=1, keep=2, former=Former(former))
    checkpoints.newest()
    (_write(checkpoints, 30) / "model").write_text("damaged")

    newest = checkpoints.newest()

    assert newest is not None
    assert (20, former) == (newest.step, newest.directory.parent)


@pytest.mark.parametrize(
    ("step", "harm", "words"),
    [
        (30, None, "no checkpoint of step 30: it has those of steps 20, 40"),
        (None, "contents torn", r"step-00000040 is not whole: .*names another step"),
        (40, "changed", r"model has changed since it was written; .*names another step"),
        (40, "endless", r"model is no file; .*names another step"),
        (40, "elsewhere", r"step-00000040 is not whole: .*names another step"),
        (None, "all gone", "no checkpoint: it has none"),
        (None, "no directory", "can't be read"),
    ],
)
def test_a_former_checkpoint_that_can_not_be_used_is_named_and_no_older_one_is_taken(
    tmp_path: Path, step: int | None, harm: str | None, words: str
) -> None:
    former, own = _former(tmp_path, 20, 40)
    match harm:
        case "contents torn":
            (former / "step-00000040" / CONTENTS).write_text("{")
        case "changed":
            (former / "step-00000040" / "model").write_text("weights of 41")
        case "endless":
            (former / "step-00000040" / "model").unlink()
            (former / "step-00000040" / "model").symlink_to("/dev/zero")
        case "elsewhere":
            contents = former / "step-00000040" / CONTENTS
            contents.write_text(contents.read_text().replace('"model"', '"../step-00000020/model"'))
        case "all gone":
            for name in _names(former):
                (former / name).rename(tmp_path / name)
        case "no directory":
            former = tmp_path / "absent"
        case _:
            assert harm is None

    with pytest.raises(ConfigError, match=words):
        Checkpoints(own, lineage=1, keep=2, former=Former(former, step)).newest()
    assert [] == _names(own), "nothing is remembered"


def test_a_checkpoint_says_where_the_prompts_go_on(tmp_path: Path) -> None:
    written = Checkpoints(tmp_path, lineage=1, keep=2).write(
        5, keep=2, fill=lambda _: None, prompt_position=PromptPosition(160)
    )

    assert 160 == Contents.read(written.directory).prompt_position


def _former(place: Path, *steps: int) -> tuple[Path, Path]:
    """The checkpoints of a job that is over, and an empty volume."""
    former, own = place / "former", place / "own"
    former.mkdir()
    own.mkdir()
    for step in steps:
        _write(Checkpoints(former, lineage=8, keep=9), step, keep=9)
    return former, own
