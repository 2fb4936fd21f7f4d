"""Plays an environment of verifiers against a job, group after group, so that the job trains on it.

    python play.py stockroom.toml --gateway http://127.0.0.1:8080/v1

Needs verifiers and the environment's package, and nothing of Colocated RL. The gateway does the rest: what was
generated is recorded there, and a switch is not seen here. Each episode is a session, named by verifiers itself, and
ends with its reward; one that failed is given up and played again. Ends when the job does, or with SIGTERM.

So many groups at a time and no more are played or wait for a batch: what is played ahead of need would be too old.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import logging
import os
import signal
import tomllib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

LOG = logging.getLogger("play")

ATTEMPTS = 3  # to play one episode; then its group is given up
LOOK_S = 1.0  # between looks at what waits for a batch
AWAY_S = 300.0  # that the gateway may be away before the job is taken for ended: its pod may be started again


class JobEnded(Exception):
    """Nobody answers at the gateway's address any more."""


class GatewayClient:
    """A client of a job's gateway, for everything but completions."""

    def __init__(self, address: str, http: httpx.AsyncClient) -> None:
        self.address = address.rstrip("/")
        self._http = http

    async def model(self) -> str:
        found: str = (await self._ask("GET", "/models")).json()["data"][0]["id"]
        return found

    async def sessions(self) -> dict[str, Any]:
        """Return the sessions that the controller holds, and how many make a group."""
        found: dict[str, Any] = (await self._ask("GET", "/sessions")).json()
        return found

    async def reward(self, session: str, reward: float, group: str) -> bool:
        """Send the reward, and return whether it was accepted: a session may have become too old."""
        answer = await self._ask("POST", f"/sessions/{session}/reward", {"reward": reward, "group": group})
        return answer.status_code == httpx.codes.OK

    async def give_up(self, session: str) -> None:
        await self._ask("DELETE", f"/sessions/{session}")

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        """Again while the rollout controller is away or ends. Raises JobEnded."""
        deadline = asyncio.get_running_loop().time() + AWAY_S
        while asyncio.get_running_loop().time() < deadline:
            with contextlib.suppress(httpx.TransportError):
                answer = await self._http.request(method, f"{self.address}{path}", json=body)
                if answer.status_code < httpx.codes.INTERNAL_SERVER_ERROR:
                    return answer
            await asyncio.sleep(LOOK_S)
        raise JobEnded(f"{self.address} has not answered for {AWAY_S:.0f} s")


class Player:
    """Play one environment against one job."""

    def __init__(self, environment: Any, gateway: GatewayClient, *, model: str, group_size: int) -> None:
        self._environment = environment
        self._gateway = gateway
        self._group_size = group_size
        # the gateway's own limits and temperature count: nothing is asked for
        client = vf.EvalClientConfig(base_url=gateway.address, api_key_var="COLOCATE_TOKEN")
        self._context = vf.ModelContext(client=client, model=model, sampling=vf.SamplingConfig())
        self._run = uuid.uuid4().hex  # a former run's sessions are in no group of this one
        self._sessions: dict[str, set[str]] = {}  # by group, those that have their reward

    async def play(self, tasks: Iterator[Any], *, groups: int) -> None:
        """All tasks, in order, so many groups at a time. Raises JobEnded."""
        playing: set[asyncio.Task[None]] = set()
        async with self._environment.serving(), asyncio.TaskGroup() as team:
            for number, task in enumerate(tasks):
                while len(playing) + len(await self._waiting()) >= groups:
                    if playing:
                        _, playing = await asyncio.wait(playing, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                    else:
                        await asyncio.sleep(LOOK_S)
                group = f"{number}-{self._run}"
                playing.add(team.create_task(self._play_group(task, group), name=group))

    async def _waiting(self) -> set[str]:
        """Whole groups that no batch has taken yet."""
        held = {session["id"] for session in (await self._gateway.sessions())["data"]}
        self._sessions = {group: left for group, sessions in self._sessions.items() if (left := sessions & held)}
        return {*self._sessions}

    async def _play_group(self, task: Any, group: str) -> None:
        played = await asyncio.gather(*(self._play_episode(task, group) for _ in range(self._group_size)))
        sessions = {session for session in played if session is not None}
        if len(sessions) == self._group_size:
            self._sessions[group] = sessions
            LOG.info("group %s is played", group)
            return
        LOG.warning("group %s is given up: %d of its episodes failed", group, self._group_size - len(sessions))
        for session in sessions:
            await self._gateway.give_up(session)

    async def _play_episode(self, task: Any, group: str) -> str | None:
        """The session of an episode that has its reward; None if none came to its end."""
        for _ in range(ATTEMPTS):
            (slot,) = self._environment.slots(task)
            episode = await self._environment.run_slot(slot, self._context)
            traces = [trace for trace in episode.traces if trace.agent.trainable]
            if episode.ok and len(traces) == 1 and await self._gateway.reward(traces[0].id, traces[0].reward, group):
                session: str = traces[0].id
                return session
            LOG.warning("an episode of group %s failed: %s", group, _why(episode, traces))
            for trace in episode.traces:
                await self._gateway.give_up(trace.id)
        return None


def _why(episode: Any, traces: list[Any]) -> str:
    errors = [*episode.errors, *(error for trace in traces for error in trace.errors)]
    if errors:
        return f"{errors[-1].type}: {errors[-1].message}"
    return f"{len(traces)} agents of it are trained, and one can be" if len(traces) != 1 else "its reward was not taken"


async def run(config: dict[str, Any], address: str, *, groups: int, passes: int | None) -> None:
    """Play all tasks. passes: over all tasks; None: as long as there is a job."""
    environment = load_environment(resolve_env_config(config["env"]))
    taskset = environment.taskset.select(vf.SelectConfig(**config.get("select", {})))
    async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
        gateway = GatewayClient(address, http)
        group_size = (await gateway.sessions())["group_size"]
        player = Player(environment, gateway, model=await gateway.model(), group_size=group_size)
        rounds = itertools.count() if passes is None else range(passes)
        await player.play((task for _ in rounds for task in taskset), groups=groups)


def main() -> None:
    parser = argparse.ArgumentParser(description="Play an environment of verifiers against a job.")
    parser.add_argument("config", type=Path, help="[env] and [select], as vf-eval takes them")
    parser.add_argument("--gateway", default="http://127.0.0.1:8080/v1")
    parser.add_argument("--groups", type=int, default=64, help="at a time, played or waiting for a batch")
    parser.add_argument("--passes", type=int, help="over all tasks; without it as long as there is a job")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    for talkative in ("httpx", "aiohttp.access"):
        logging.getLogger(talkative).setLevel(logging.WARNING)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.environ.setdefault("COLOCATE_TOKEN", "none")  # on the pod's loopback there is no key
    config = tomllib.loads(given.config.read_text())
    try:
        asyncio.run(run(config, given.gateway, groups=given.groups, passes=given.passes))
    except* JobEnded as ended:
        LOG.info("the job has ended: %s", ended.exceptions[0])
    except* KeyboardInterrupt:
        LOG.info("stopped: what is under way is dropped by the gateway")


if __name__ == "__main__":
    main()
