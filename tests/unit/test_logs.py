"""These tests check the fields that every log line of a process has."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import logging
import subprocess
import sys

import pytest

from colocated_rl_api.logs import SHOW_MESSAGES, JsonLines, failure_of
from colocated_rl_trainer.protocol.settings import ConfigError

PROGRAM = """
import logging, threading
from colocated_rl_api.logs import bind, configure, log
configure(role="operator")
configure(pod="colocated-rl-0")
with bind(job="sums"):
    log(logging.getLogger(), "mine")
    thread = threading.Thread(target=lambda: log(logging.getLogger(), "another's"))
    thread.start()
    thread.join()
"""


def test_what_is_true_of_a_process_is_in_the_lines_of_all_its_threads() -> None:
    """Lines of the thread that has the Lease named neither role nor pod: no filter found them."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    mine, others = (json.loads(line) for line in done.stdout.splitlines())
    assert {"role": "operator", "pod": "colocated-rl-0", "job": "sums"} == fields_of(mine)
    assert {"role": "operator", "pod": "colocated-rl-0"} == fields_of(others)


def fields_of(line: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in line.items() if name in ("role", "pod", "job")}


def line_of(error: BaseException, *, quotes: bool = False) -> str:
    """A log line with an exception that was raised."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines(quotes=quotes))
    handler.handle(logging.LogRecord("x", logging.ERROR, __file__, 1, "it failed", (), (type(error), error, None)))
    return stream.getvalue()


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:  # noqa: BLE001 - any of them
        return caught


def test_an_exception_is_logged_by_type_and_place_and_its_words_are_not() -> None:
    """A verifier's and a parser's quote what they were given: prompts, responses, answers."""
    group = BaseExceptionGroup("secret", [raised(ValueError("secret"), raised(KeyError("secret")))])
    line = line_of(raised(group))
    assert "secret" not in line
    for part in ("ExceptionGroup", "ValueError", "KeyError", f'File \\"{__file__}\\", line ', "in raised"):
        assert part in line


def test_a_line_of_source_is_not_in_a_traceback_either() -> None:
    assert "a text in the program" not in line_of(raised(ValueError("a text in the program")))


def test_our_own_exceptions_have_their_words_and_so_has_the_operating_system() -> None:
    assert "ConfigError: mend it" in line_of(raised(ConfigError("mend it")))
    assert "ConfigError: mend it" == failure_of(raised(ConfigError("mend it")))
    assert "No space left" in failure_of(raised(OSError(errno.ENOSPC, "No space left on device")))
    assert "secret" not in failure_of(raised(OSError("secret"))), "anybody may raise one"
    assert failure_of(raised(ValueError("secret"))).startswith(f"ValueError at {__file__}:")


def test_whoever_sees_no_prompts_or_was_asked_to_logs_the_words(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "of the API server" in line_of(raised(ValueError("of the API server")), quotes=True)
    monkeypatch.setenv(SHOW_MESSAGES, "1")
    assert "for its author" in line_of(raised(ValueError("for its author")))


async def test_what_asyncio_reports_of_a_task_has_no_words_of_its_exception() -> None:
    """It shows the task, and the task shows its exception."""
    stream = io.StringIO()
    handler, logger = logging.StreamHandler(stream), logging.getLogger("asyncio")
    handler.setFormatter(JsonLines())
    logger.addHandler(handler)
    logger.propagate = False
    try:

        async def fails() -> None:
            raise ValueError("secret")

        task = asyncio.ensure_future(fails())
        await asyncio.wait([task])
        del task
        asyncio.get_running_loop().call_exception_handler(
            {"message": "Task was lost", "exception": raised(ValueError("secret")), "data": "secret"}
        )
    finally:
        logger.removeHandler(handler)
        logger.propagate = True
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert {"Task exception was never retrieved", "Task was lost"} == {line["event"] for line in lines}
    assert "secret" not in stream.getvalue()
