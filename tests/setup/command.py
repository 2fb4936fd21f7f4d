"""The set-up's command line: what to make, and what to run as soon as which part of it is there."""

import argparse
import fcntl
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import NoReturn, TextIO

from setup import environments, localcluster, lock, model, preflight, toolchain, trained_model
from setup.layout import CHECKOUT, Layout
from setup.session import SetupError, SetupSession
from setup.tasks import Board

EVERYTHING = (environments.DEV, localcluster.BINARY, localcluster.IMAGE_LIST, model.MODEL)
BESIDES = (
    environments.PEERS,
    environments.FRAMEWORKS,
    trained_model.TRAINED_MODEL,
)  # made for whoever names it: neither the demo nor a job needs it
FAILED, BAD_MACHINE, STOPPED = 1, 2, 130


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="setup", description=__doc__)
    parser.add_argument(
        "--only", choices=(*EVERYTHING, *BESIDES), action="append", help="make this part and what it needs, no other"
    )
    parser.add_argument(
        "--then",
        nargs=2,
        action="append",
        default=[],
        metavar=("PARTS", "TARGET"),
        help="when PARTS (with commas between; all: everything) are there, make TARGET",
    )
    parser.add_argument("--lock", action="store_true", help="resolve all requirement files anew, and nothing else")
    options = parser.parse_args(words)

    runs_jobs = not options.only and not options.lock
    lacking = list(preflight.problems(preflight.inspect(CHECKOUT, runs_jobs=runs_jobs)))
    if lacking:
        sys.stderr.write("".join(f"{line}\n" for line in lacking))
        return BAD_MACHINE
    signal.signal(signal.SIGTERM, _interrupt)
    session = SetupSession(CHECKOUT.logs)
    try:
        return _run(session, options)
    except SetupError as error:
        session.say(f"failed: {error}")
        return FAILED
    except KeyboardInterrupt:
        session.say("stopped; what is finished is kept, the same command goes on from there")
        return STOPPED
    finally:
        session.stop()


def _run(session: SetupSession, options: argparse.Namespace) -> int:
    held = _one_at_a_time(CHECKOUT, session)
    board = Board(
        [
            toolchain.task(CHECKOUT),
            *environments.tasks(CHECKOUT),
            localcluster.binary_task(CHECKOUT),
            localcluster.images_task(CHECKOUT),
            model.task(CHECKOUT),
            trained_model.task(CHECKOUT),
        ],
        session,
    )
    if options.lock:
        board.finish([toolchain.TOOLS])
        lock.resolve(CHECKOUT, session)
        return 0
    parts: Sequence[str] = options.only or EVERYTHING
    parts = [*parts, *(part for wanted, _ in options.then for part in wanted.split(",") if part in BESIDES)]
    board.begin(parts)
    for wanted, target in options.then:
        named = wanted.split(",")
        board.finish(parts if "all" in named else named)
        if board.is_finished(parts):
            held.close()
        code = _make(session, target)
        if code != 0:
            return code
    board.finish(parts)
    if not options.then and not options.only:
        session.say("everything is there")
    return 0


def _make(session: SetupSession, target: str) -> int:
    began = time.monotonic()
    code = session.show([os.environ.get("MAKE", "make"), "--no-print-directory", target], cwd=CHECKOUT.root)
    session.say(f"make {target}: {'passed' if code == 0 else 'failed'} after {time.monotonic() - began:.0f} s")
    return code


def _one_at_a_time(layout: Layout, session: SetupSession) -> TextIO:
    """Wait until no other set-up works on this checkout; the open file that holds the others off."""
    layout.build.mkdir(exist_ok=True)
    file = (layout.build / "lock").open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        session.say("another set-up of this checkout is under way: waiting for it")
        fcntl.flock(file, fcntl.LOCK_EX)
    return file


def _interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt
