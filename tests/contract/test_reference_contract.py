"""These tests hold the real reference on its own devices and the fake to the same answers."""

from __future__ import annotations

import asyncio
import math
import ssl
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from contract.trainer_in_process import only_rank
from numpy.typing import NDArray
from real_reference import RunningReference

from colocated_rl_api import names
from colocated_rl_api.member_wire import Endpoint, JobFile
from colocated_rl_api.reference_wire import MAX_SAMPLE_BYTES, SCORE_PATH, ScoreError
from colocated_rl_member.tls import MemberTls
from fakes.authority import FakeAuthority
from fakes.reference import FakeReference
from fakes.tiny_model import VOCABULARY, write_tiny_model

TOKEN = "a-token-of-this-test"
ANSWER_S = 60.0
SAMPLE = (3, 1, 4, 1, 5, 9, 2, 6)


@dataclass(frozen=True)
class AskedReference:
    """A reference, and how its callers get there."""

    endpoint: Endpoint
    context: ssl.SSLContext
    server_name: str
    authorization: str
    session: aiohttp.ClientSession

    async def ask(self, path: str, body: bytes, **headers: str) -> tuple[int, str, bytes]:
        """Status, media type and body. headers: the job's token, when none are given."""
        async with self.session.post(
            f"https://127.0.0.1:{self.endpoint.port}{path}",
            data=body,
            headers=headers or {"Authorization": self.authorization},
            ssl=self.context,
            server_hostname=self.server_name,
        ) as answer:
            return answer.status, answer.content_type, await answer.read()

    async def logp(self, *ids: int, start: int = 1, temperature: float = 1.0) -> NDArray[np.float32]:
        path = f"{SCORE_PATH}?start={start}&temperature={temperature}"
        status, kind, body = await self.ask(path, np.array(ids, "<i4").tobytes())
        assert (200, "application/octet-stream") == (status, kind), body
        return np.frombuffer(body, "<f4")


def refusal(status: int, kind: str, body: bytes) -> tuple[int, str]:
    """Status and error."""
    assert kind == "application/json"
    error = ScoreError.model_validate_json(body)
    assert error.message
    return status, error.error


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, names.JobUid]:
    """A directory as `names.TLS_DIR`, and the job that it is of."""
    folder = tmp_path_factory.mktemp("job")
    settings = only_rank(folder, folder, {}, has_reference=True, is_apart=True)
    uid = JobFile.read(settings.job.read_bytes()).uid
    return FakeAuthority().member_directory(folder / "tls", job_uid=uid, token=TOKEN), uid


@pytest.fixture(scope="module")
def real(tls: tuple[Path, names.JobUid], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningReference]:
    folder, directory = tmp_path_factory.mktemp("real"), tls[0]
    (folder / "trainer.json").write_text('{"threads": 1}')
    model = write_tiny_model(folder / "model")
    with RunningReference(
        folder, directory.parent / "job.json", model=model, config=folder / "trainer.json", tls=directory
    ) as running:
        running.await_ready()
        yield running


@pytest.fixture(params=["fake", "real"])
async def reference(request: pytest.FixtureRequest, tls: tuple[Path, names.JobUid]) -> AsyncIterator[AskedReference]:
    own = MemberTls.read(tls[0])
    way = own.client_context(), names.member_server_name(tls[1]), own.authorization
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_S)) as session:
        if request.param == "real":
            yield AskedReference(request.getfixturevalue("real").endpoint, *way, session)
            return
        async with FakeReference("fake", own, vocabulary=VOCABULARY).listening() as fake:
            yield AskedReference(fake.endpoint, *way, session)


async def test_every_token_from_the_start_on_has_a_log_probability(reference: AskedReference) -> None:
    for start in range(1, len(SAMPLE)):
        logp = await reference.logp(*SAMPLE, start=start)
        assert len(SAMPLE) - start == len(logp)
        assert (logp < 0).all()


async def test_an_answer_follows_from_the_question_alone(reference: AskedReference) -> None:
    """Therefore it may be sent again, to any pod, from any place, while others send theirs."""
    alone = await reference.logp(*SAMPLE)
    again = await asyncio.gather(*(reference.logp(*SAMPLE, start=start) for start in range(1, len(SAMPLE))))
    for start, logp in enumerate(again, 1):
        np.testing.assert_allclose(alone[start - 1 :], logp, rtol=1e-5, atol=1e-5)


async def test_other_temperature_and_other_tokens_have_other_answers(reference: AskedReference) -> None:
    one = await reference.logp(*SAMPLE)
    assert not np.allclose(one, await reference.logp(*SAMPLE, temperature=0.5), atol=1e-3)
    assert not np.allclose(one, await reference.logp(*SAMPLE[::-1]), atol=1e-3)


@pytest.mark.parametrize("token", ["Bearer another-token-than-ours", "Bearer ", TOKEN, "-"])
async def test_nobody_without_the_token_is_answered(reference: AskedReference, token: str) -> None:
    headers = {"Authorization": token} if token != "-" else {"Accept": "*/*"}
    path = f"{SCORE_PATH}?start=1&temperature=1"
    assert (401, "TokenNeeded") == refusal(*await reference.ask(path, bytes(64), **headers))


@pytest.mark.parametrize(
    ("query", "body", "words"),
    [
        ("", bytes(16), "start= and temperature= must be numbers"),
        ("?start=one&temperature=1", bytes(16), "must be numbers"),
        ("?start=1&temperature=nan", bytes(16), "temperature is nan"),
        ("?start=1&temperature=inf", bytes(16), "temperature is inf"),
        ("?start=1&temperature=0", bytes(16), "temperature is 0"),
        ("?start=1&temperature=-1", bytes(16), "temperature is -1"),
        ("?start=0&temperature=1", bytes(16), "start is 0, must be from 1 to below the 4 tokens"),
        ("?start=4&temperature=1", bytes(16), "start is 4"),
        ("?start=1&temperature=1", b"", "start is 1, must be from 1 to below the 0 tokens"),
        ("?start=1&temperature=1", bytes(15), "15 bytes is no row of int32"),
        ("?start=1&temperature=1", b"\xff" * 16, f"not one of the {VOCABULARY} of the model"),
        ("?start=1&temperature=1", np.array([0, VOCABULARY], "<i4").tobytes(), "not one of the"),
    ],
)
async def test_question_that_means_nothing_is_the_samples_fault(
    request: pytest.FixtureRequest, reference: AskedReference, query: str, body: bytes, words: str
) -> None:
    """400 says so: no other pod is asked. Its words are the real one's alone."""
    status, kind, answer = await reference.ask(SCORE_PATH + query, body)
    assert (400, "BadRequest") == refusal(status, kind, answer)
    assert words in ScoreError.model_validate_json(answer).message or "[fake" in request.node.name


async def test_other_paths_are_named(reference: AskedReference) -> None:
    assert (404, "NotFound") == refusal(*await reference.ask("/v1/other?start=1&temperature=1", bytes(16)))


async def test_body_larger_than_any_sample_is_refused_before_it_is_read(reference: AskedReference) -> None:
    async with asyncio.timeout(ANSWER_S):
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", reference.endpoint.port, ssl=reference.context, server_hostname=reference.server_name
        )
        head = (
            f"POST {SCORE_PATH}?start=1&temperature=1 HTTP/1.1",
            "Host: reference",
            f"Authorization: {reference.authorization}",
            f"Content-Length: {MAX_SAMPLE_BYTES + 4}",
        )
        writer.write("\r\n".join([*head, "", ""]).encode())
        answer = await reader.readuntil(b"\r\n\r\n")
        writer.transport.abort()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"connection: close" in answer.lower()


async def test_refusals_do_not_cost_a_caller_its_connection(reference: AskedReference) -> None:
    """They come one behind the other on it, as many as samples: what was sent with each is read."""
    one = aiohttp.TCPConnector(limit=1)
    async with aiohttp.ClientSession(connector=one, timeout=reference.session.timeout) as session:
        caller = AskedReference(
            reference.endpoint, reference.context, reference.server_name, reference.authorization, session
        )
        for _ in range(3):
            assert HTTPStatus.BAD_REQUEST == (await caller.ask(f"{SCORE_PATH}?start=9&temperature=1", bytes(32)))[0]
            assert HTTPStatus.NOT_FOUND == (await caller.ask("/v1/other", bytes(32)))[0]
            assert not math.isnan(float((await caller.logp(*SAMPLE)).sum()))
