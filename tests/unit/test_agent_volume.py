"""Calls of a file system that may never answer, and what is remembered of its answers."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
from collections.abc import Generator
from pathlib import Path, PosixPath
from typing import ClassVar

import pytest

from colocated_rl_agent.files.exports import Exports
from colocated_rl_agent.files.volume import (
    Beat,
    VolumeDirectory,
    VolumeSilent,
    in_threads,
)
from colocated_rl_api.rungs import WeightVersion

PLACE = Path("/weights")
SOON_S = 0.02
LATER_S = 60.0  # more than any of these tests takes


class HeldServer:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.answers = threading.Event()

    def call(self, beat: Beat) -> str:
        assert self.answers.wait(LATER_S)
        return "answer"


class StoppedClock:
    """Stands still but for the test."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_call_returns_or_raises_what_the_file_system_said() -> None:
    volume = VolumeDirectory(PLACE)

    def refuse(beat: Beat) -> None:
        raise PermissionError("not for you")

    assert "here" == await volume.call("look", lambda _: "here")
    with pytest.raises(PermissionError, match="not for you"):
        await volume.call("look", refuse)


async def test_silent_call_is_given_up_and_no_other_begins_before_it_has_ended() -> None:
    volume, server = VolumeDirectory(PLACE, silent_s=SOON_S), HeldServer()
    with pytest.raises(VolumeSilent, match=re.escape("/weights does not answer: to list exports took over")):
        await volume.call("list exports", server.call)
    begun = threading.active_count()
    for _ in range(3):
        with pytest.raises(VolumeSilent, match="to list exports took over"):
            await volume.call("remove exports", server.call)
    assert begun >= threading.active_count()

    server.answers.set()
    async with asyncio.timeout(LATER_S):
        while True:
            try:
                assert "answer" == await volume.call("remove exports", server.call)
                break
            except VolumeSilent:
                await asyncio.sleep(0)


async def test_call_that_gets_on_may_take_as_long_as_it_needs() -> None:
    clock, server = StoppedClock(), HeldServer()
    volume = VolumeDirectory(PLACE, silent_s=SOON_S, clock=clock)

    def read_slowly(beat: Beat) -> str:
        for _ in range(5):
            clock.now += 0.9 * SOON_S
            beat()
        return server.call(beat)

    reading = asyncio.create_task(volume.call("read", read_slowly))
    done, _ = await asyncio.wait({reading}, timeout=5 * SOON_S)
    assert not done
    server.answers.set()
    assert "answer" == await reading


def test_process_ends_although_a_call_of_it_does_not() -> None:
    program = (
        "import asyncio, threading; from pathlib import Path; from colocated_rl_agent.files.volume import *\n"
        "def hang(beat): in_threads('hash', lambda _: threading.Event().wait(), [1, 2], at_once=2)\n"
        "try: asyncio.run(VolumeDirectory(Path('/weights'), silent_s=0.01).call('read', hang))\n"
        "except VolumeSilent: print('given up')\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LATER_S, check=True)
    assert ("given up\n", "") == (ended.stdout, ended.stderr)


def test_threads_give_results_in_order_or_what_the_first_failed_one_raised() -> None:
    assert [1, 4, 9] == in_threads("square", lambda number: number**2, [1, 2, 3], at_once=2)
    with pytest.raises(ZeroDivisionError):
        in_threads("invert", lambda number: 1 / number, [1, 0, 2], at_once=2)


def test_an_export_of_thousands_of_files_takes_no_more_threads_than_one_of_a_few() -> None:
    """A pod may have so many processes and threads, and a thread for each file was more."""
    used = in_threads("look", lambda _: threading.current_thread(), range(3000), at_once=2)
    assert 3000 == len(used)
    assert 2 >= len({*used})


class Held(PosixPath):
    """A directory that is listed when the test says so."""

    begun: ClassVar[threading.Event] = threading.Event()
    goes_on: ClassVar[threading.Event] = threading.Event()

    def iterdir(self) -> Generator[Held, None, None]:
        found = list(super().iterdir())
        self.begun.set()
        assert self.goes_on.wait(LATER_S)
        yield from found


async def test_a_look_that_was_overtaken_by_an_export_says_nothing(tmp_path: Path) -> None:
    exports = Exports(VolumeDirectory(Held(tmp_path)))
    looking = asyncio.create_task(exports.look())
    await asyncio.to_thread(Held.begun.wait, LATER_S)
    (tmp_path / "1-1").mkdir()
    exports.may_have_changed()
    Held.goes_on.set()
    await looking
    assert None is exports.has_others_than(None), "it saw none"
    await exports.look()
    assert (True, False) == (exports.has_others_than(None), exports.has_others_than(WeightVersion(1, 1)))
