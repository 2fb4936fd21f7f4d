"""An operator that only raises epochs, on the loop of the real one: prints what a connection takes, in KiB.

Reads a line of JSON: the authority's files, and the ports of members that all say the same of themselves. The second
figure is what it takes when its member has answered in two more epochs.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from builders import UID
from colocated_rl_api import names
from colocated_rl_api.member_wire import Goal, PodTarget
from colocated_rl_api.rungs import Rung
from colocated_rl_operator.__main__ import run
from colocated_rl_operator.clients.authority import Authority, Keyring
from colocated_rl_operator.clients.members import Address, Members

FIRST = 8  # connections that pay for what all share


def resident_kib() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Rss:"))


async def measure(authority: Authority, ports: Sequence[int]) -> tuple[float, float]:
    heard = asyncio.Event()
    addresses = [
        Address(f"pod-{port}", names.PodUid("uid-0"), names.ROLE_GPU, "127.0.0.1", port, has_own_keys=False)
        for port in ports
    ]
    async with Members(
        Keyring(authority, b"k" * 32).operator_context(), lambda job_uid, *, hurry=True: heard.set()
    ) as members:

        async def answered(number: int, epoch: int) -> int:
            members.keep(UID, addresses[:number])
            target = PodTarget(epoch=epoch, goal=Goal.CLIMB, step=0, lineage=1, rung=Rung.SEALED)
            while not all(answer.facts and answer.facts.epoch == epoch for answer in members.answers(UID).values()):
                heard.clear()
                members.send(UID, dict.fromkeys(members.answers(UID), target))
                await heard.wait()
            return resident_kib()

        few, all_of_them = await answered(FIRST, 1), await answered(len(ports), 1)
        usual = (all_of_them - few) / (len(ports) - FIRST)
        await answered(len(ports), 2)
        return usual, usual + (await answered(len(ports), 3) - all_of_them) / len(ports)


if __name__ == "__main__":
    setup = json.loads(sys.stdin.readline())
    files = {name: text.encode() for name, text in setup["authority"].items()}
    print(*run(measure(Authority.read(files), setup["ports"])))  # noqa: T201
