"""A former job's files in a remote directory that rclone shows as a volume, read-only, as claims of object storage do.

It is FUSE over HTTP: its files have no hard links and no numbers that last, and its locks hold on this machine alone.
Trainers and store are real.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from contract.trainer_in_process import sealed_batches
from safetensors.torch import load_file
from unit.test_rollout_store import JOB, checkpoint, three_steps

from colocated_rl_rollout.store.former import FormerJob
from colocated_rl_rollout.store.store import Store
from colocated_rl_trainer.conformance.ranks import TrainerGroup, TrainerKind, free_port
from colocated_rl_trainer.protocol.settings import ConfigError
from colocated_rl_trainer.state.checkpoint import Checkpoints, Former
from fakes.tiny_model import write_tiny_model

DEADLINE_S = 120.0
CONFIG = {"advantage": "Mean", "threads": 1}
CONTENT = bytes(range(256)) * (1 << 14) + b"x"  # 4 MiB, and no whole page at the end


@contextmanager
def shown(directory: Path, at: Path) -> Iterator[Path]:
    """Mount a directory through an HTTP server while the block runs."""
    at.mkdir()
    port = free_port()
    serve = ["rclone", "serve", "webdav", "--read-only", f"--addr=127.0.0.1:{port}", str(directory)]
    mount = ["rclone", "mount", "--read-only", f"--webdav-url=http://127.0.0.1:{port}", ":webdav:", str(at)]
    environment = os.environ | {"RCLONE_CONFIG": os.devnull}
    with (at.parent / f"{at.name}.log").open("wb") as log:
        programs = [subprocess.Popen(words, env=environment, stdout=log, stderr=log) for words in (serve, mount)]
    try:
        until = time.monotonic() + DEADLINE_S
        while not at.is_mount():
            ended = [each.args for each in programs if each.poll() is not None]
            assert not ended, f"{ended}: {log.name}"
            assert time.monotonic() < until, f"not mounted: {log.name}"
            time.sleep(0.1)  # the kernel has no event for a mount
        yield at
    finally:
        subprocess.run(["umount", "--lazy", str(at)], check=False)
        for each in programs:
            each.terminate()
            each.wait(DEADLINE_S)


def test_a_checkpoint_in_a_remote_directory_is_verified_and_begun_from(tmp_path: Path) -> None:
    """All of its files are read and compared with their hashes, and nothing is written to where they are."""
    former, own = tmp_path / "former", tmp_path / "own"
    former.mkdir()
    own.mkdir()
    for step in (20, 40):
        Checkpoints(former, lineage=1, keep=9).write(step, keep=9, fill=fill)
    with shown(former, tmp_path / "volume") as volume:
        found = Checkpoints(own, lineage=1, keep=2, former=Former(volume, step=20)).newest()
        again = Checkpoints(own, lineage=2, keep=2, former=Former(volume)).newest()
        assert found is not None
        assert found == again, "later starts begin from the same one"
        assert (20, volume / "step-00000020") == (found.step, found.directory)
        assert CONTENT == (found.directory / "weights").read_bytes()
    (former / "step-00000020" / "weights").write_bytes(CONTENT[:-1] + b"y")
    with shown(former, tmp_path / "changed") as volume, pytest.raises(ConfigError, match="has changed since it was"):
        Checkpoints(tmp_path, lineage=1, keep=2, former=Former(volume, step=20)).newest()


def fill(directory: Path) -> None:
    (directory / "weights").write_bytes(CONTENT)


def test_trainers_go_on_from_a_checkpoint_in_a_remote_directory(tmp_path: Path) -> None:
    """They read the weights that the former ones had, train the next step, and write nothing to where those are."""
    kind = TrainerKind("grpo", [sys.executable, "-m", "colocated_rl_trainer"], write_tiny_model(tmp_path / "m"), CONFIG)
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    (one, two) = sealed_batches(tmp_path, steps=2, split=2)
    with TrainerGroup(kind, first, size=2) as group:
        group.wait_loaded()
        group.onload()
        group.train(1, one)
        group.save(1)
        expected = load_file(group.export(1)[0] / "model.safetensors")
    with (
        shown(first / "checkpoints", tmp_path / "volume") as volume,
        TrainerGroup(kind, second, size=2, former=volume) as group,
    ):
        assert {1} == {status.step for status in group.wait_loaded()}
        group.onload()
        found = load_file(group.export(1)[0] / "model.safetensors")
        assert {2} == {status.step for status in group.train(2, two)}
        assert {2} == {status.saved for status in group.save(2)}
    assert expected.keys() == found.keys()
    assert all(expected[name].equal(found[name]) for name in expected)


def test_samples_of_a_remote_directory_go_on_as_they_were(tmp_path: Path) -> None:
    (tmp_path / "former").mkdir()
    counts = three_steps(tmp_path / "former")
    checkpoint(tmp_path / "former", 1, position=1)
    with shown(tmp_path / "former", tmp_path / "volume") as volume:
        former = FormerJob(volume / "checkpoints", samples=volume / "first")
        store = Store(tmp_path / "own", job_uid=JOB, former=former)
    assert counts == +store.counts
    assert (1, 2, 4) == (store.began_at, store.trained_step, store.next_step)
    assert [2, 3] == [step for step in (1, 2, 3, 4) if store.batch(step)], "replayed, and next"
    store.close()
