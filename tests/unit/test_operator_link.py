"""The operator's end of a connection to a member: what it reads, what it refuses, what it keeps for a slow member."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import facts_at, make_climb, make_job, make_observation, rollout_facts
from colocated_rl_api.member_wire import HEARTBEAT_S, MAX_MESSAGE_BYTES
from colocated_rl_api.rungs import Rung, WeightVersion
from colocated_rl_operator.clients.errors import ContractBroken
from colocated_rl_operator.clients.link import (
    GUID,
    PING,
    PONG,
    TEXT,
    Link,
    make_frame,
)
from colocated_rl_operator.planner.roster import muster
from colocated_rl_operator.planner.silence import SILENCE_S

CLOSE = 0x8
LONG_AGO_S = 60.0


class KeptWire(asyncio.Transport):
    """A Wire keeps what the link writes, and whether it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))

    def close(self) -> None:
        self.is_closed = True


class Peer:
    """A link, and who answers it."""

    def __init__(self, *, hear: Callable[[bytes], None] | None = None, ping_s: float = LONG_AGO_S) -> None:
        self.now = 1000.0
        self.heard: list[bytes] = []
        take = hear or self.heard.append
        self.wire = KeptWire()
        host, clock = "10.0.0.1:7443", lambda: self.now
        self.link = Link(host=host, ping_s=ping_s, hear=lambda link, text: take(text), clock=clock)
        self.link.connection_made(self.wire)
        (self.request,) = self.wire.written

    def receive(self, data: bytes) -> None:
        """Receive as event loops hand data over: as much at a time as there is room for."""
        while data:
            room = self.link.get_buffer(len(data))
            size = min(len(room), len(data))
            room[:size], data = data[:size], data[size:]
            self.link.buffer_updated(size)

    def upgrade(self, accept: bytes | None = None) -> bytes:
        (key,) = (line[19:] for line in self.request.split(b"\r\n") if line.startswith(b"Sec-WebSocket-Key: "))
        accept = accept or base64.b64encode(hashlib.sha1(key + GUID, usedforsecurity=False).digest())
        return b"HTTP/1.1 101 Switching Protocols\r\nSec-WebSocket-Accept: " + accept + b"\r\n\r\n"

    def open(self) -> Peer:
        self.receive(self.upgrade())
        self.wire.written.clear()
        return self

    async def why(self) -> Exception:
        with pytest.raises((ContractBroken, OSError)) as raised:
            async with asyncio.timeout(60):
                await self.link.ended()
        assert self.wire.is_closed
        return raised.value


def of_server(payload: bytes, kind: int = TEXT) -> bytes:
    size = len(payload)
    if size < 126:
        return bytes([0x80 | kind, size]) + payload
    if size < 1 << 16:
        return bytes([0x80 | kind, 126]) + size.to_bytes(2) + payload
    return bytes([0x80 | kind, 127]) + size.to_bytes(8) + payload


def unmasked(frame: bytes) -> tuple[int, bytes]:
    size, at = frame[1] & 0x7F, 2
    assert frame[1] & 0x80, "a client masks"
    if size > 125:
        at += {126: 2, 127: 8}[size]
        size = int.from_bytes(frame[2:at])
    mask, payload = frame[at : at + 4], frame[at + 4 :]
    assert len(payload) == size
    return frame[0] & 0x0F, bytes(byte ^ mask[place % 4] for place, byte in enumerate(payload))


# -------------------------------------------------------------------------------------------------------- what it reads
@pytest.mark.parametrize("size", [0, 1, 125, 126, 65_535, 65_536, MAX_MESSAGE_BYTES])
async def test_messages_of_any_length_go_both_ways(size: int) -> None:
    text = bytes(place % 251 for place in range(size))
    assert (TEXT, text) == unmasked(make_frame(TEXT, text))
    peer = Peer().open()
    peer.receive(of_server(text))
    assert [text] == peer.heard


@given(texts=st.lists(st.binary(max_size=300), max_size=5), cuts=st.lists(st.integers(0, 2000), max_size=8))
def test_however_the_network_cuts_it_every_message_is_heard_once(texts: list[bytes], cuts: list[int]) -> None:
    async def run() -> None:
        peer = Peer()
        data = peer.upgrade() + b"".join(map(of_server, texts))
        places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
        for begin, end in pairwise(places):
            peer.receive(data[begin:end])
        assert texts == peer.heard

    asyncio.run(run())


async def test_a_ping_is_answered_with_its_payload() -> None:
    peer = Peer().open()
    peer.receive(of_server(b"are you there", PING))
    assert [(PONG, b"are you there")] == [unmasked(frame) for frame in peer.wire.written]


async def test_the_first_message_is_waited_for() -> None:
    peer = Peer().open()
    waiting = asyncio.create_task(peer.link.first_message())
    await asyncio.sleep(0)
    assert not waiting.done()
    peer.receive(of_server(b"hello"))
    await waiting


# ------------------------------------------------------------------------------------------------------ what it refuses
@pytest.mark.parametrize(
    "sent",
    [
        of_server(b"\x00", 0x2),  # binary
        bytes([TEXT, 1]) + b"a",  # a fragment
        bytes([0xC0 | TEXT, 1]) + b"a",  # compressed
        make_frame(TEXT, b"a"),  # masked
        bytes([0x80 | TEXT, 127]) + (MAX_MESSAGE_BYTES + 1).to_bytes(8),
    ],
    ids=["binary", "fragment", "compressed", "masked", "long"],
)
async def test_what_was_never_offered_ends_the_connection(sent: bytes) -> None:
    peer = Peer().open()
    peer.receive(of_server(b"before") + sent + of_server(b"after"))
    assert isinstance(await peer.why(), ContractBroken)
    assert [b"before"] == peer.heard


@pytest.mark.parametrize("answer", [b"HTTP/1.1 403 Forbidden\r\n\r\n", b"x" * 9000], ids=["refused", "endless"])
async def test_an_answer_that_is_no_upgrade_ends_the_connection(answer: bytes) -> None:
    peer = Peer()
    peer.receive(answer)
    assert isinstance(await peer.why(), ConnectionError)


async def test_an_upgrade_of_another_connection_is_none() -> None:
    peer = Peer()
    peer.receive(peer.upgrade(accept=b"c29tZXRoaW5nIGVsc2U="))
    assert isinstance(await peer.why(), ConnectionError)


async def test_what_hears_may_end_the_connection_and_hears_no_more() -> None:
    def refuse(text: bytes) -> None:
        raise ContractBroken(f"not {text!r}")

    peer = Peer(hear=refuse).open()
    peer.receive(of_server(b"this"))
    with pytest.raises(ContractBroken, match="this"):
        await peer.link.first_message()
    peer.receive(of_server(b"that"))
    assert "not b'this'" == str(await peer.why())


# ------------------------------------------------------------------------------------------------------- a slow member
async def test_of_what_a_slow_member_has_not_taken_only_the_newest_is_kept() -> None:
    peer = Peer().open()
    peer.link.pause_writing()
    for text in (b"first", b"second", b"third"):
        peer.link.send(make_frame(TEXT, text))
    peer.receive(of_server(b"", PING))  # the answer would overtake nothing, and cost memory
    assert [] == peer.wire.written
    peer.link.resume_writing()
    assert [(TEXT, b"third")] == [unmasked(frame) for frame in peer.wire.written]


async def test_a_member_that_sends_nothing_after_a_ping_is_lost() -> None:
    peer = Peer(ping_s=0.01).open()
    assert isinstance(await peer.why(), TimeoutError)
    assert (PING, b"") in [unmasked(frame) for frame in peer.wire.written]


@pytest.mark.parametrize("word", [of_server(b"facts"), of_server(b"", PONG), b"\x81"], ids=["facts", "pong", "a part"])
async def test_silence_begins_with_the_last_word_and_not_with_the_loss_of_the_link(word: bytes) -> None:
    """A node that was gone had ten seconds more than was said, until its link counted as lost."""
    peer = Peer(ping_s=HEARTBEAT_S).open()
    peer.now += 3.0
    peer.receive(word)
    for quiet_s in (0.0, HEARTBEAT_S, 2 * HEARTBEAT_S):
        peer.now = 1003.0 + quiet_s
        assert 1003.0 == peer.link.silent_since


@pytest.mark.parametrize("stood_still_s", [2 * HEARTBEAT_S, 60.0, 3600.0])
async def test_an_operator_that_stood_still_leaves_members_most_of_their_time_to_be_reached(
    stood_still_s: float,
) -> None:
    """Its links end all at once or in part, with words on them that it has not read."""
    peer = Peer(ping_s=HEARTBEAT_S).open()
    peer.now += stood_still_s
    served = facts_at(Rung.SERVING, WeightVersion(1, 1))
    seen = make_observation(make_job(replicas=2), [served, None], climb=make_climb(1), rollout=rollout_facts())
    silent = replace(seen.current["gpu-1"], silent_since=peer.link.silent_since)
    members = tuple(silent if each.uid == silent.uid else each for each in seen.members)
    left_s = SILENCE_S - 2 * HEARTBEAT_S
    assert left_s >= 20.0
    for after_s, is_replaced in ((0.0, False), (left_s - 0.5, False), (left_s, True)):
        actions, _ = muster(replace(seen, members=members, now=peer.now + after_s))
        assert is_replaced is bool(actions)


async def test_a_member_that_closes_is_gone_at_once() -> None:
    peer = Peer().open()
    peer.receive(of_server(b"\x03\xe8", CLOSE))
    assert isinstance(await peer.why(), ConnectionResetError)
    peer.link.send(make_frame(TEXT, b"too late"))
    assert [] == peer.wire.written
