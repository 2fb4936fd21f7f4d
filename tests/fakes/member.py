"""Members that speak the real protocol over real TLS, and do what `fakes.group` lets them.

`FakeMember` is one agent or rollout controller on an address of its own; its driver is the group's table of moves, so
the group's invariants are checked on every move here too. `FakeKubelet` runs one for each pod that an API server shows
it, and reports the pod's phase and address.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NoReturn

from prometheus_client import CollectorRegistry

from colocated_rl_agent.files.journal import EpochAccepted
from colocated_rl_api import names
from colocated_rl_api.member_wire import Hello, PodTarget, RolloutTarget
from colocated_rl_api.seats import role_of
from colocated_rl_member.server import MemberServer, Ports
from colocated_rl_member.tls import MemberTls
from fakes.group import GpuPod, ModelGroup, RolloutPod

Body = dict[str, Any]


class FakeMember:
    """One member of a job, while it lives.

    holds: whether it stays where it stands under a target. on_target: called when it has another one.
    """

    def __init__(
        self,
        group: ModelGroup,
        pod: GpuPod | RolloutPod,
        *,
        name: str,
        job_uid: str,
        host: str,
        tls: Path,
        control: int,
    ) -> None:
        self.group = group
        self.pod = pod
        self.holds: Callable[[PodTarget | RolloutTarget], bool] = lambda target: False
        self.on_target: Callable[[], None] = lambda: None
        self.seen: list[PodTarget | RolloutTarget] = []
        self.listens = False
        self._moved = asyncio.Event()
        is_gpu = isinstance(pod, GpuPod)
        hello = Hello(
            pod=name,
            pod_uid=pod.uid,
            job_uid=job_uid,
            role=role_of(pod.seat),
            replica=int(pod.seat.rpartition("-")[2]) if is_gpu else None,
            incarnation="i1",
            highest_epoch=pod.durable_epoch if isinstance(pod, GpuPod) else 0,
        )
        common: dict[str, Any] = {
            "hello": hello,
            "tls": MemberTls.read(tls),
            "facts": lambda: pod.facts,
            "remember_epoch": self._remember,
            "ports": Ports(control=control, data=0, metrics=0, pages=0, host=host),
            "registry": CollectorRegistry(),
        }
        self.server: MemberServer[Any] = (
            MemberServer(kind=PodTarget, accept=self._accept_pod, **common)
            if is_gpu
            else MemberServer(kind=RolloutTarget, accept=self._accept_rollout, **common)
        )

    def _remember(self, epoch: int) -> None:
        if isinstance(self.pod, GpuPod):
            self.pod.state = self.pod.state.wrote(EpochAccepted(epoch=epoch))

    def _accept_pod(self, target: PodTarget) -> None:
        assert isinstance(self.pod, GpuPod)
        self.seen.append(target)
        self.group.accept(self.pod, target)
        self.wake()
        self.on_target()

    def _accept_rollout(self, target: RolloutTarget) -> None:
        assert isinstance(self.pod, RolloutPod)
        self.seen.append(target)
        self.pod.target = target
        self.wake()
        self.on_target()

    def wake(self) -> None:
        """Something changed: move on, and tell the operator."""
        self._moved.set()

    async def live(self, changed: Callable[[], None]) -> None:
        """Act until stopped or cancelled. changed: called after each move, for members that wait for one another."""
        try:
            async with self.server:
                self.listens = True
                while self.pod.alive and not self.pod.stopped:
                    self._moved.clear()
                    if self._move():
                        self.server.publish()
                        changed()
                        await asyncio.sleep(0)
                        continue
                    self.server.publish()
                    await self._moved.wait()
        finally:
            self.listens = False

    def _move(self) -> bool:
        if self.pod.target is not None and self.holds(self.pod.target):
            return False
        if isinstance(self.pod, GpuPod):
            return self.group.agent_moves(self.pod)
        return self.group.rollout_moves(self.pod)


class FakeKubelet:
    """Runs a member for each pod. set_status: writes a pod's status to the API server. ended: a pod is gone for good.

    Each pod has its own loopback address, because the control port is the same everywhere.
    """

    def __init__(
        self,
        group: ModelGroup,
        directory: Path,
        *,
        read_secret: Callable[[str], Coroutine[None, None, dict[str, str]]],
        set_status: Callable[[Body, Body], Coroutine[None, None, None]],
        ended: Callable[[Body], Coroutine[None, None, None]],
        tasks: asyncio.TaskGroup,
    ) -> None:
        self.group = group
        self.members: dict[str, FakeMember] = {}
        self.tasks = tasks
        self.moved = asyncio.Event()  # any member did something, or was told to; for tests that wait
        self._directory = directory
        self._read_secret = read_secret
        self._set_status = set_status
        self._ended = ended
        self._keys: dict[str, Path] = {}
        self._lives: dict[str, asyncio.Task[None]] = {}
        self._net = f"127.{random.randrange(10, 250)}.{random.randrange(1, 250)}"
        self._hosts = iter(range(1, 250))
        self.blocked: set[str] = set()  # names of pods for which there is no node
        self.is_patient = False  # pods that are deleted go on, within their grace
        self.loads = asyncio.Event()  # whether references get their models
        self.loads.set()
        self.holds: dict[str, Callable[[PodTarget | RolloutTarget], bool]] = {}  # by seat

    def note(self, event: str, pod: Body) -> None:
        """A watch event of a pod; others than jobs' pods are not run here."""
        if names.ROLE_LABEL not in pod["metadata"].get("labels", {}):
            return
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        if event == "DELETED":
            self.end(uid)
        elif pod["metadata"].get("deletionTimestamp"):
            if uid in self._lives and not self.is_patient:
                self.end(uid)
                self.tasks.create_task(self._ended(pod), name=f"end/{name}")
        elif (
            name not in self.blocked
            and uid not in self._lives
            and pod.get("status", {}).get("phase") in (None, "Pending")
        ):
            self._lives[uid] = self.tasks.create_task(self._run(pod), name=f"run/{name}")

    def end(self, uid: str) -> None:
        """The pod's processes die; one that is on its way out by itself is left to it."""
        life, member = self._lives.pop(uid, None), self.members.pop(uid, None)
        if member is not None:
            member.pod.alive = False
        if life is not None and (member is None or (member.listens and not member.pod.stopped)):
            life.cancel()  # not while it begins to listen: asyncio would lose its socket

    def end_all(self) -> None:
        for uid in list(self._lives):
            self.end(uid)

    async def _run(self, pod: Body) -> None:
        metadata = pod["metadata"]
        labels = metadata["labels"]
        seat = labels[names.ROLE_LABEL]
        if seat == names.ROLE_REFERENCE:
            await self._stay(pod)
        if seat in names.GPU_ROLES:
            seat = f"{seat}-{labels[names.REPLICA_LABEL]}"
        simulated = self.group.add(seat, int(labels[names.ATTEMPT_LABEL]), metadata["uid"])
        try:
            await self._live(pod, simulated)
        except asyncio.CancelledError:
            simulated.alive = False
        finally:
            self.moved.set()

    async def _stay(self, pod: Body) -> NoReturn:
        """Run a reference, which is no member: the pod runs, and is ready once it has loaded."""
        host = f"{self._net}.{next(self._hosts)}"

        async def tell(*, is_ready: bool) -> None:
            ready = {"type": "Ready", "status": str(is_ready)}
            await self._set_status(pod, {"phase": "Running", "podIP": host, "conditions": [ready]})

        await tell(is_ready=False)
        await self.loads.wait()
        await tell(is_ready=True)
        while True:
            await asyncio.Event().wait()

    async def _live(self, pod: Body, simulated: GpuPod | RolloutPod) -> None:
        metadata, seat, host = pod["metadata"], simulated.seat, f"{self._net}.{next(self._hosts)}"
        member = FakeMember(
            self.group,
            simulated,
            name=metadata["name"],
            job_uid=metadata["labels"][names.JOB_UID_LABEL],
            host=host,
            tls=await self._tls(pod),
            control=names.CONTROL_PORT,
        )
        member.holds = lambda target: seat in self.holds and self.holds[seat](target)
        member.on_target = self.moved.set
        self.members[metadata["uid"]] = member
        await self._set_status(pod, {"phase": "Running", "podIP": host})
        await member.live(self.wake_all)
        if simulated.stopped:
            await self._set_status(pod, {"phase": "Succeeded", "podIP": host})

    def hold(self, seat: str, under: Callable[[PodTarget | RolloutTarget], bool]) -> None:
        """The seat's member stays where it stands under such targets, until `release`."""
        self.holds[seat] = under

    def release(self, seat: str) -> None:
        del self.holds[seat]
        self.wake_all()

    def wake_all(self) -> None:
        self.moved.set()
        for member in self.members.values():
            member.wake()

    def of_seat(self, seat: str) -> FakeMember:
        return next(member for member in self.members.values() if member.pod.seat == seat)

    def directory_of(self, pod: str) -> Path:
        """Return the directory with the keys of a pod."""
        return self._keys[pod]

    async def _tls(self, pod: Body) -> Path:
        volume = next(volume for volume in pod["spec"]["volumes"] if volume["name"] == "tls")
        name: str = volume["secret"]["secretName"]
        directory = self._keys[pod["metadata"]["name"]] = self._directory / name
        directory.mkdir(parents=True, exist_ok=True)
        for file, text in (await self._read_secret(name)).items():
            (directory / file).write_text(text)
        return directory
