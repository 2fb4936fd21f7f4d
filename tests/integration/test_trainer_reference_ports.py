"""A reference's desk and ports, without a model: who is answered together, and who is not answered at all."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from colocated_rl_api import names
from colocated_rl_trainer.ref_policy import ports
from colocated_rl_trainer.ref_policy.figures import ScoreCounts
from colocated_rl_trainer.ref_policy.ports import MetricsPort, ScorePort
from colocated_rl_trainer.ref_policy.score_queue import QueuedSample, ScoreQueue, ScoringFailed
from colocated_rl_trainer.ref_policy.score_requests import ScoreRequests
from fakes.authority import FakeAuthority

JOB_UID = names.JobUid("6f0d1c52-8a35-4a7c-9d55-0c8a3f1b2e4d")
TOKEN = "a-token-of-this-test"
DEADLINE_S = 60.0
hasty = pytest.mark.parametrize("port", [0.2], indirect=True)


def question(tokens: int, temperature: float = 1.0) -> QueuedSample:
    return QueuedSample(memoryview(array("i", range(tokens))), 1, temperature)


def put(desk: ScoreQueue, *questions: QueuedSample) -> list[threading.Thread]:
    """Queue requests in this order."""
    callers = []
    for number, each in enumerate(questions, desk.waiting + 1):
        callers.append(threading.Thread(target=_ask, args=(desk, each), daemon=True))
        callers[-1].start()
        while desk.waiting < number:
            pass
    return callers


def _ask(desk: ScoreQueue, each: QueuedSample) -> None:
    with contextlib.suppress(ScoringFailed):
        desk.ask(each, deadline_s=DEADLINE_S)


def test_a_device_takes_the_oldest_and_what_is_like_it_and_fits() -> None:
    desk = ScoreQueue(most_tokens=10)
    asked = [question(4), question(3, 0.5), question(7), question(5), question(12)]
    callers = put(desk, *asked)

    taken = [[asked.index(each) for each in desk.take()] for _ in range(4)]

    assert [[0, 3], [1], [2], [4]] == taken
    assert 0 == desk.waiting
    for each in asked:
        each.answer.set_exception(ScoringFailed("as the test has it"))
    for caller in callers:
        caller.join(DEADLINE_S)


def test_who_has_gone_is_passed_over() -> None:
    desk, gone, there = ScoreQueue(most_tokens=10), question(3), question(3)
    with pytest.raises(TimeoutError):
        desk.ask(gone, deadline_s=0)
    (caller,) = put(desk, there)

    assert [there] == desk.take()
    there.answer.set_result(b"")
    caller.join(DEADLINE_S)


def requests() -> ScoreRequests:
    return ScoreRequests(ScoreQueue(most_tokens=10), 0.05, ScoreCounts(CollectorRegistry()))


@pytest.fixture
def port(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ScorePort]:
    """An indirect parameter is the time that strangers have."""
    unauthenticated_s = getattr(request, "param", DEADLINE_S)
    tls = FakeAuthority().member_directory(tmp_path / "tls", job_uid=JOB_UID, token=TOKEN)
    made = ScorePort("127.0.0.1", 0, tls=tls, requests=requests(), unauthenticated_s=unauthenticated_s)
    made.listen("data")
    yield made
    made.shutdown()
    made.server_close()


def connect(port: ScorePort, tls: Path) -> ssl.SSLSocket:
    context = ssl.create_default_context(cafile=str(tls / names.CA_FILE))
    plain = socket.create_connection(("127.0.0.1", port.number), timeout=DEADLINE_S)
    return context.wrap_socket(plain, server_hostname=names.member_server_name(JOB_UID))


def connect_in_time(port: ScorePort, tls: Path) -> ssl.SSLSocket:
    """Connect, with several tries where a slow machine needs them to be quicker than the port."""
    while True:
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            return connect(port, tls)


def read_all(connection: socket.socket) -> bytes:
    """Read until the other side hangs up."""
    found = b""
    try:
        while piece := connection.recv(4096):
            found += piece
    except (ConnectionError, ssl.SSLError):
        pass  # it did so without a word
    return found


@hasty
def test_a_stranger_that_says_nothing_is_hung_up_on_before_and_after_the_handshake(
    port: ScorePort, tmp_path: Path
) -> None:
    with socket.create_connection(("127.0.0.1", port.number), timeout=DEADLINE_S) as silent:
        assert b"" == read_all(silent)
    with connect_in_time(port, tmp_path / "tls") as polite:
        assert b"" == read_all(polite)


@hasty
def test_a_stranger_that_says_a_word_now_and_then_is_hung_up_on_too(port: ScorePort, tmp_path: Path) -> None:
    with connect_in_time(port, tmp_path / "tls") as slow:
        assert is_hung_up_on(slow)


def is_hung_up_on(slow: socket.socket) -> bool:
    """Return whether the port hangs up on a client that sends a word every 10 ms, and never all of its headers."""
    never = threading.Event()
    try:
        slow.sendall(b"POST /v1/score HTTP/1.1\r\n")
        for _ in range(int(DEADLINE_S / 0.01)):
            slow.sendall(b"X-Word: more\r\n")
            never.wait(0.01)
    except OSError:
        return True
    return False


def request(body: bytes, **headers: str) -> bytes:
    lines = [f"{name}: {value}" for name, value in {"Content-Length": str(len(body)), **headers}.items()]
    return "\r\n".join(["POST /v1/score?start=1&temperature=1 HTTP/1.1", "Host: x", *lines, "", ""]).encode() + body


def test_address_that_is_none_is_not_found(port: ScorePort, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Anybody could fill the log with tracebacks, and had no answer."""
    metrics = MetricsPort("127.0.0.1", 0, requests=port.requests)
    metrics.listen("metrics")
    with socket.create_connection(("127.0.0.1", metrics.number), timeout=DEADLINE_S) as anybody:
        anybody.sendall(b"GET http://[ HTTP/1.1\r\nConnection: close\r\n\r\n")
        assert read_all(anybody).startswith(b"HTTP/1.1 404 ")
    with connect(port, tmp_path / "tls") as caller:
        caller.sendall(request(bytes(8), Authorization=f"Bearer {TOKEN}").replace(b"/v1/score?", b"http://[?"))
        assert caller.recv(4096).startswith(b"HTTP/1.1 404 ")
    assert "" == capfd.readouterr().err
    metrics.shutdown()
    metrics.server_close()


def test_address_that_is_too_long_is_answered(port: ScorePort, capfd: pytest.CaptureFixture[str]) -> None:
    """Anybody could fill the log with tracebacks, and had no answer: nothing but a length was known of the request."""
    metrics = MetricsPort("127.0.0.1", 0, requests=port.requests)
    metrics.listen("metrics")
    with socket.create_connection(("127.0.0.1", metrics.number), timeout=DEADLINE_S) as anybody:
        anybody.sendall(b"GET /".ljust(2**16 + 1, b"a"))  # all that is read of a line
        assert read_all(anybody).startswith(b"HTTP/1.1 414 ")
    assert "" == capfd.readouterr().err
    metrics.shutdown()
    metrics.server_close()


def test_a_connection_for_which_no_thread_starts_keeps_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """After as many as there are places the port accepted nobody any more, where a limit
    of processes was reached for a moment.
    """
    monkeypatch.setattr(ports, "MAX_CONNECTIONS", 2)
    metrics = MetricsPort("127.0.0.1", 0, requests=requests())
    metrics.listen("metrics")
    usual = threading.stack_size(2**60)  # more than there is
    try:
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", metrics.number), timeout=DEADLINE_S) as anybody:
                assert b"" == read_all(anybody)
    finally:
        threading.stack_size(usual)
    with socket.create_connection(("127.0.0.1", metrics.number), timeout=DEADLINE_S) as anybody:
        anybody.sendall(b"GET /healthz HTTP/1.1\r\nConnection: close\r\n\r\n")
        assert read_all(anybody).startswith(b"HTTP/1.1 200 ")
    metrics.shutdown()
    metrics.server_close()


def test_while_the_model_is_loaded_questions_are_to_come_again(port: ScorePort, tmp_path: Path) -> None:
    with connect(port, tmp_path / "tls") as caller:
        caller.sendall(request(bytes(8), Authorization=f"Bearer {TOKEN}", Connection="close"))
        answer = read_all(caller)
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b'"error":"Starting"' in answer


def test_a_question_that_no_device_takes_in_time_is_told_so_and_forgotten(port: ScorePort, tmp_path: Path) -> None:
    port.requests.vocabulary = 10
    with connect(port, tmp_path / "tls") as caller:
        caller.sendall(request(bytes(8), Authorization=f"Bearer {TOKEN}", Connection="close"))
        answer = read_all(caller)
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b'"error":"Late"' in answer


def test_a_token_that_is_too_short_to_be_one_ends_the_process(tmp_path: Path) -> None:
    tls = FakeAuthority().member_directory(tmp_path / "tls", job_uid=JOB_UID, token="short")
    with pytest.raises(ValueError, match="a data token has at least 16 characters, this one 5"):
        ScorePort("127.0.0.1", 0, tls=tls, requests=requests())
