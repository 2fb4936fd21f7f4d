"""Members and operator of a job grow old together: months pass by the wall clock, and then it is trained.

    WALL_CLOCK=FILE LD_PRELOAD=... python -m fakes.aging_job DIRECTORY DAYS...

The file is the clock's, see `preloaded`. Prints, as JSON, what was found after each move to so many DAYS, and then.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from colocated_rl_api import names
from colocated_rl_operator.clients.authority import find_keyring
from colocated_rl_operator.loop.keys import keep_keys
from fakes.member import FakeMember
from fakes.preloaded import set_clock
from fakes.world import DEADLINE_S, SPEC, FakeWorld, open_world, stay_in_rollout

OFTEN_S = 0.02
DAY_S = 86_400


async def served_until(world: FakeWorld, member: FakeMember) -> float:
    """Return how many days the certificate still lasts that a new connection gets, which the operator has to accept."""
    hello, ports = member.server.hello, member.server.ports
    name = names.pod_server_name(hello.job_uid, hello.pod)
    context = world.keyring.operator_context()
    _, writer = await asyncio.open_connection(ports.host, ports.control, ssl=context, server_hostname=name)
    certificate = writer.get_extra_info("peercert")
    writer.transport.abort()
    return (ssl.cert_time_to_seconds(certificate["notAfter"]) - datetime.now(UTC).timestamp()) / DAY_S


async def grow_old(directory: Path, days: list[int]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    async with open_world(directory, SPEC) as world:
        stay_in_rollout(world)
        async with world.operator() as operator:
            members = operator.context.doors.members
            kube = operator.context.doors.kube
            world.keyring.replace(*(await find_keyring(kube, "operators")).material)
            members.tls = world.keyring.operator_context()
            keeping = asyncio.create_task(keep_keys(kube, "operators", world.keyring, members, every_s=OFTEN_S))
            await world.until(lambda: world.status.get("phase") == "Rollout")
            links = [member.server._link for member in world.kubelet.members.values()]
            for day in days:
                set_clock(Path(os.environ["WALL_CLOCK"]), day * DAY_S)
                async with asyncio.timeout(DEADLINE_S):
                    while members.outdated:  # noqa: ASYNC110 - nobody is told of renewed keys
                        await asyncio.sleep(OFTEN_S)
                served = [await served_until(world, member) for member in world.kubelet.members.values()]
                is_same = links == [member.server._link for member in world.kubelet.members.values()]
                lost = operator.metrics.lost._value.get()
                found.append({"days_left": min(served), "same_links": is_same, "lost": lost})
            first = world.kubelet.of_seat("gpu-0")
            await first.server._end_link()  # its next connection is by certificates that were not there at the start
            await world.until(lambda: operator.metrics.lost._value.get() and members.connected == len(links))
            world.kubelet.release("rollout")
            await world.until(lambda: world.status.get("phase") == "Complete")
            keeping.cancel()
        found.append({"restarts": world.status["restarts"], "trained": world.group.trained_in})
    return found


if __name__ == "__main__":
    print(json.dumps(asyncio.run(grow_old(Path(sys.argv[1]), [int(each) for each in sys.argv[2:]]))))  # noqa: T201
