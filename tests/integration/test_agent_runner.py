"""The runner as a real process, spoken to through the agent's end of its socket."""

from __future__ import annotations

import ast
import asyncio
import itertools
import math
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

import pytest
import refusing_kernel

from colocated_rl_agent.runner import runner
from colocated_rl_agent.runner.runner_link import (
    KILLED,
    ChildExited,
    RunnerEvent,
    RunnerHello,
    RunnerLink,
    RunnerLost,
    RunnerRefused,
    RunnerTerminating,
    RunnerUnreachable,
)
from colocated_rl_agent.runner.runner_link import Device as Memory
from colocated_rl_operator.manifests import resources
from fakes.device import GIB, TOTAL_BYTES, FakeDevice

DEADLINE_S = 60.0  # less than what is killed would live by itself


@cache
def oldest_python() -> str:
    """An interpreter of at least 3.9, of those that this machine has: the runner runs in images that are not ours."""
    for minor in range(9, sys.version_info.minor):
        kept, named = Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python3"), shutil.which(f"python3.{minor}")
        for python in [*map(str, kept), *filter(None, [named])]:  # to start a shim takes longer than to start Python
            answer = subprocess.run([python, "-I", "-S", "-c", ""], capture_output=True, check=False)
            if answer.returncode == 0:  # a shim may have nothing behind it
                return python
    return sys.executable


SLEEP = ["sleep", "600"]


class RunnerContainer:
    """A runner process and a connected agent that remembers every event."""

    def __init__(self, directory: Path, call_s: float) -> None:
        self.socket = directory / "runner.sock"
        self.output = directory / "output"
        self.events: list[RunnerEvent] = []
        self._changed = asyncio.Event()
        self.link = RunnerLink(self.socket, self._on_event, call_s=call_s)
        self.process: asyncio.subprocess.Process

    def _on_event(self, event: RunnerEvent) -> None:
        self.events.append(event)
        self._changed.set()

    async def start(
        self, *, grace_s: float = 60.0, env: Mapping[str, str] | None = None, before: Sequence[str] = ()
    ) -> None:
        with self.output.open("ab") as output:
            self.process = await asyncio.create_subprocess_exec(
                oldest_python(),
                *before,
                runner.__file__,
                env={
                    **os.environ,
                    **(env or {}),
                    runner.SOCKET: str(self.socket),
                    runner.GRACE: str(grace_s),
                    "LEAKED": "yes",
                },
                stdout=output,
            )

    async def until(
        self, kind: type[RunnerEvent], is_it: Callable[[RunnerEvent], bool] = lambda event: True
    ) -> RunnerEvent:
        async with asyncio.timeout(DEADLINE_S):
            while True:
                for event in self.events:
                    if isinstance(event, kind) and is_it(event):
                        return event
                self._changed.clear()
                await self._changed.wait()

    async def exited(self, incarnation: str) -> ChildExited:
        event = await self.until(
            ChildExited, lambda event: isinstance(event, ChildExited) and event.incarnation == incarnation
        )
        assert isinstance(event, ChildExited)
        return event

    async def hello(self) -> RunnerHello:
        event = await self.until(RunnerHello)
        assert isinstance(event, RunnerHello)
        return event


@asynccontextmanager
async def container(
    directory: Path,
    *,
    grace_s: float = 60.0,
    env: Mapping[str, str] | None = None,
    call_s: float = DEADLINE_S,
    before: Sequence[str] = (),
) -> AsyncIterator[RunnerContainer]:
    """Run a runner. before: arguments before the runner's own."""
    it = RunnerContainer(directory, call_s)
    await it.start(grace_s=grace_s, env=env, before=before)
    connection = asyncio.create_task(it.link.run())
    try:
        await it.hello()
        yield it
    finally:
        connection.cancel()
        if it.process.returncode is None:
            it.process.kill()
        await it.process.wait()


def is_alive(pid: int) -> bool:
    try:
        return state(pid) != "Z"
    except FileNotFoundError:
        return False


def children(pid: int) -> str:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text()


async def test_memory_that_an_earlier_container_left_is_freed_at_the_start_of_the_next(tmp_path: Path) -> None:
    """Files of shared memory outlive a container that was killed, and its pod was charged for them for good."""
    shm, elsewhere, tmp = tmp_path / "shm", tmp_path / "elsewhere", tmp_path / "tmp"
    (shm / "of/a/library").mkdir(parents=True)
    elsewhere.mkdir()
    (tmp / "of/an/engine").mkdir(parents=True)
    for path in (shm / "nccl-1", shm / "of/a/library/segment", elsewhere / "kept"):
        path.write_bytes(b"data")
    (shm / "link").symlink_to(elsewhere)
    (shm / "of/link").symlink_to(elsewhere / "kept")
    async with container(tmp_path, env={runner.WIPED: f"{shm}:{tmp}"}):
        assert [] == [*shm.iterdir(), *tmp.iterdir()]
        assert b"data" == (elsewhere / "kept").read_bytes()
        (shm / "new").touch()
    assert (shm / "new").exists()


async def test_child_runs_with_its_own_environment_and_reports_its_exit(tmp_path: Path) -> None:
    async with container(tmp_path) as it:
        script = "import os; print(os.environ['A'], os.environ.get('LEAKED')); raise SystemExit(3)"
        incarnation = await it.link.start("engine-0", [sys.executable, "-c", script], {"A": "b", "LEAKED": None})
        exited = await it.exited(incarnation)
        assert (3, ("b None",)) == (exited.code, exited.tail)


async def test_what_became_of_a_start_that_was_given_up_is_in_the_next_hello(tmp_path: Path) -> None:
    """Another lineage was wanted meanwhile: the rank ran on, unknown to the agent, and each later start was refused."""
    async with container(tmp_path) as it:
        starting = asyncio.create_task(it.link.start("trainer-1", SLEEP, {}))
        await asyncio.sleep(0)  # it is asked
        starting.cancel()
        hellos: list[RunnerHello] = []
        async with asyncio.timeout(DEADLINE_S):
            while len(hellos) < 2:
                await asyncio.sleep(0.01)
                hellos = [event for event in it.events if isinstance(event, RunnerHello)]
        assert bool(children(it.process.pid)) is bool(hellos[1].children)


async def test_a_fork_that_fails_is_reported_and_what_runs_goes_on(tmp_path: Path) -> None:
    async with container(tmp_path, before=[refusing_kernel.__file__, "forks"]) as it:
        waits = [sys.executable, "-c", "input()"]
        running = await it.link.start("engine-0", [sys.executable, "-c", "import time; time.sleep(600)"], {})
        it.process.send_signal(signal.SIGUSR1)
        for _ in range(2):
            with pytest.raises(RunnerRefused, match=r"CannotStart: .*Resource temporarily unavailable"):
                await it.link.start("trainer-0", waits, {})
        await it.link.kill("engine-0")
        assert -signal.SIGKILL == (await it.exited(running)).code


async def test_output_of_a_child_is_passed_on_with_its_name_and_without_secrets(tmp_path: Path) -> None:
    async with container(tmp_path) as it:
        incarnation = await it.link.start(
            "engine-0", [sys.executable, "-c", "print('key=hunter22 ok')"], {}, secrets=["hunter22"]
        )
        await it.exited(incarnation)
        assert "[engine-0] key=*** ok" in it.output.read_text().splitlines()


async def test_nothing_runs_after_a_start_that_was_refused(tmp_path: Path) -> None:
    """It ran, and nobody knew of it: what was wrong with the secrets was seen when it had been started."""
    async with container(tmp_path) as it:
        with pytest.raises(RunnerRefused, match="BadRequest"):
            await it.link.start("engine-0", SLEEP, {}, secrets=["\ud800"])
        assert "" == children(it.process.pid)


async def test_runner_whose_output_nobody_reads_goes_on_and_says_what_was_lost(tmp_path: Path) -> None:
    """It waited for its reader, and the agent could end no engine meanwhile."""
    os.mkfifo(tmp_path / "output")
    reader = os.open(tmp_path / "output", os.O_RDONLY | os.O_NONBLOCK)  # or to open it would wait for the runner
    os.set_blocking(reader, True)
    output = bytearray()

    async def hear(words: bytes) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while words not in output:
                output.extend(await asyncio.to_thread(os.read, reader, 1 << 20))

    try:
        async with container(tmp_path) as it:
            print_more = f"print(('x' * 1023 + '\\n') * {2 * runner.MAX_UNREAD // 1024})"
            loud = await it.link.start("engine-0", [sys.executable, "-c", print_more], {})
            assert 0 == (await it.exited(loud)).code
            await hear(b'"event": "output lost", "role": "runner", "lines": ')
            assert runner.MAX_UNREAD < len(output) < 2 * runner.MAX_UNREAD, "what it kept, and no more"
            await it.link.start("engine-0", ["echo", "it", "reads", "again"], {})
            await hear(b"[engine-0] it reads again\n")
            await it.link.exit(7)
            await hear(b'"event": "runner ending"')
            assert 7 == await it.process.wait()
    finally:
        os.close(reader)


async def test_secret_that_is_empty_is_none(tmp_path: Path) -> None:
    async with container(tmp_path) as it:
        incarnation = await it.link.start("engine-0", ["echo", "words"], {}, secrets=[""])
        assert ("words",) == (await it.exited(incarnation)).tail


async def test_secret_is_not_cut_in_two_where_a_long_line_is(tmp_path: Path) -> None:
    """An engine writes all its arguments into one line, and both halves of its key could be shown."""
    async with container(tmp_path) as it:
        script = f"print('x' * {runner.MAX_OUTPUT_LINE - 4} + 'hunter22' + 'y' * 9000, end='')"
        incarnation = await it.link.start("engine-0", [sys.executable, "-c", script], {}, secrets=["hunter22"])
        await it.exited(incarnation)
        output = it.output.read_text().replace("\n[engine-0] ", "")
        assert "xxx***yyy" in output


async def test_progress_bar_in_the_output_is_shown_as_it_ended(tmp_path: Path) -> None:
    async with container(tmp_path) as it:
        script = r"print('\r  0%\r 50%\r100%')"
        exited = await it.exited(await it.link.start("engine-0", [sys.executable, "-c", script], {}))
        assert ("100%",) == exited.tail


async def test_tail_of_a_child_is_bounded(tmp_path: Path) -> None:
    async with container(tmp_path) as it:
        script = "print('x' * 100000); [print(i) for i in range(1000)]"
        exited = await it.exited(await it.link.start("engine-0", [sys.executable, "-c", script], {}))
        assert tuple(str(number) for number in range(960, 1000)) == exited.tail


LATE_REQUEST = """
import os, runpy, signal, sys
from types import SimpleNamespace
of = SimpleNamespace(**runpy.run_path(sys.argv[1]))
it = of.Runner(sys.argv[2], 60.0)
it._carry_out({"op": "start", "name": "engine-0", "argv": ["sleep", "600"], "env": {}})
child = it.children["engine-0"]
os.kill(child.process.pid, signal.SIGKILL)
os.waitid(os.P_PID, child.process.pid, os.WEXITED | os.WNOWAIT)
it._carry_out({"op": "kill", "name": "engine-0"})
sys.stderr.write(f"{child.code} {child.killed}")
"""


async def test_a_child_that_had_ended_was_not_killed_by_the_request_that_came_after(tmp_path: Path) -> None:
    """A call to an engine that the kernel has killed for its memory fails before the runner knows of its end."""
    async with container(tmp_path) as it:
        asked = await it.link.start("engine-0", SLEEP, {})
        await it.link.kill("engine-0")
        assert (await it.exited(asked)).was_killed
        ended = await it.link.start("engine-0", [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], {})
        exited = await it.exited(ended)
        assert (-signal.SIGKILL, False) == (exited.code, exited.was_killed)
    command = [oldest_python(), "-c", LATE_REQUEST, runner.__file__, str(tmp_path / "late.sock")]
    late = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True)  # noqa: ASYNC221 - alone
    assert "-9 False" == late.stderr


async def test_h57_killed_leader_takes_its_whole_group_with_it(tmp_path: Path) -> None:
    async with container(tmp_path) as it:
        script = (
            "import subprocess, sys, time, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
            "rank = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
            f"open({str(tmp_path / 'pids')!r}, 'w').write(str(rank.pid) + '\\n'); time.sleep(600)"
        )
        incarnation = await it.link.start("engine-0", [sys.executable, "-c", script], {})
        pid = int(await file_line(tmp_path / "pids"))
        await it.link.kill("engine-0")
        assert -signal.SIGKILL == (await it.exited(incarnation)).code
        assert not is_alive(pid)


@pytest.mark.parametrize("way", ["kill", "stop"])
async def test_h45_child_is_gone_only_when_what_left_its_group_is(tmp_path: Path, way: str) -> None:
    """Launchers give their workers sessions of their own, and a worker without its launcher still holds the device."""
    async with container(tmp_path) as it:
        launcher = f"setsid sleep 600 & echo $! > {tmp_path}/draft; mv {tmp_path}/draft {tmp_path}/pid; wait"
        incarnation = await it.link.start("trainer-0", ["sh", "-c", launcher], {})
        pid = int(await file_line(tmp_path / "pid"))
        await until(lambda: os.getsid(pid) == pid)
        await (it.link.kill("trainer-0") if way == "kill" else it.link.stop("trainer-0", grace_s=60))
        await it.exited(incarnation)
        assert not is_alive(pid)


def test_h45_a_process_that_becomes_another_program_shows_whose_it_is_all_the_same(tmp_path: Path) -> None:
    again = tmp_path / "again"
    again.write_text('#!/bin/sh\nexec "$0"\n')
    again.chmod(0o755)
    with subprocess.Popen([again], env={"OF": "i1"}) as process:
        try:
            assert all(b"OF=i1" in runner.environment(Path(f"/proc/{process.pid}")) for _ in range(3000))
        finally:
            process.kill()


def test_what_left_a_group_is_there_until_it_has_ended_though_it_shows_its_mark_no_more() -> None:
    """The kernel takes the environment of a process first, and closes its devices then."""
    with subprocess.Popen(SLEEP) as ending:
        known = {ending.pid: runner.begun(ending.pid) or "", os.getpid(): "of an earlier one of this number"}
        assert runner.kill_strays("i1", known)
        assert [ending.pid] == [*known]
        ending.kill()
        os.waitid(os.P_PID, ending.pid, os.WEXITED | os.WNOWAIT)  # nobody has collected it
        assert not runner.kill_strays("i1", known)


async def test_dead_leader_is_gone_only_when_its_ranks_are(tmp_path: Path) -> None:
    async with container(tmp_path) as it:
        script = (
            "import subprocess, sys;"
            "rank = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
            "print(rank.pid)"
        )
        exited = await it.exited(await it.link.start("engine-0", [sys.executable, "-c", script], {}))
        assert 0 == exited.code
        assert not is_alive(int(exited.tail[-1]))


async def test_stopped_child_that_ignores_the_signal_is_killed_after_its_grace(tmp_path: Path) -> None:
    async with container(tmp_path) as it:
        script = (
            "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
            f"open({str(tmp_path / 'up')!r}, 'w').write('up\\n'); time.sleep(600)"
        )
        incarnation = await it.link.start("trainer-0", [sys.executable, "-c", script], {})
        await file_line(tmp_path / "up")
        await it.link.stop("trainer-0", grace_s=0.2)
        assert -signal.SIGKILL == (await it.exited(incarnation)).code


def test_child_that_is_gone_is_not_signalled_again() -> None:
    """Its number is another's by then: here that of a process which is not the runner's at all."""
    with subprocess.Popen(SLEEP, stdout=subprocess.PIPE, start_new_session=True) as other:
        child = runner.Child("engine-0", "i1", other, [])
        child.gone = True
        child.signal(signal.SIGKILL)
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(0.1)
        child.gone = False
        child.signal(signal.SIGKILL)
        assert -signal.SIGKILL == other.wait(DEADLINE_S)


async def test_running_name_is_not_started_twice(tmp_path: Path) -> None:
    async with container(tmp_path) as it:
        first = await it.link.start("engine-0", SLEEP, {})
        with pytest.raises(RunnerRefused, match="AlreadyRunning"):
            await it.link.start("engine-0", SLEEP, {})
        await it.link.kill("engine-0")
        await it.exited(first)
        assert first != await it.link.start("engine-0", SLEEP, {})


async def test_child_whose_start_was_answered_too_late_is_reported_again(tmp_path: Path) -> None:
    """It ran on, unknown to an agent that took it for absent: no other could be started, and it held the device."""
    async with container(tmp_path, call_s=0.2) as it:
        it.process.send_signal(signal.SIGSTOP)
        with pytest.raises(RunnerUnreachable, match="start"):
            await it.link.start("engine-0", SLEEP, {})
        it.process.send_signal(signal.SIGCONT)
        hello = await it.until(RunnerHello, lambda event: isinstance(event, RunnerHello) and event.children != ())
        assert isinstance(hello, RunnerHello)
        assert [("engine-0", True)] == [(child.name, child.running) for child in hello.children]


async def test_command_that_does_not_exist_is_refused_by_name(tmp_path: Path) -> None:
    async with container(tmp_path) as it:
        with pytest.raises(RunnerRefused, match="CannotStart: /no/such/engine"):
            await it.link.start("engine-0", ["/no/such/engine"], {})


async def test_children_outlive_the_agent_and_are_reported_to_the_next_one(tmp_path: Path) -> None:
    async with container(tmp_path) as it:
        alive = await it.link.start("engine-0", SLEEP, {})
        dead = await it.link.start("trainer-0", [sys.executable, "-c", "print('bye')"], {})
        await it.exited(dead)
        asked = await it.link.start("trainer-1", SLEEP, {})
        await it.link.kill("trainer-1")
        await it.exited(asked)
        first_said: asyncio.Future[RunnerEvent] = asyncio.get_running_loop().create_future()
        second = RunnerLink(it.socket, first_said.set_result)
        connection = asyncio.create_task(second.run())
        async with asyncio.timeout(DEADLINE_S):
            hello = await first_said
        connection.cancel()
        assert isinstance(hello, RunnerHello)
        assert {("engine-0", alive, None), ("trainer-0", dead, (0, False)), ("trainer-1", asked, (KILLED, True))} == {
            (child.name, child.incarnation, child.exit and (child.exit.code, child.exit.was_killed))
            for child in hello.children
        }


async def test_children_die_with_the_runner(tmp_path: Path) -> None:
    async with container(tmp_path) as it:
        script = (
            f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()) + '\\n'); time.sleep(600)"
        )
        await it.link.start("engine-0", [sys.executable, "-c", script], {})
        pid = int(await file_line(tmp_path / "pid"))
        it.process.kill()
        await it.until(RunnerLost)
        await until(lambda: not is_alive(pid))
        with pytest.raises(RunnerUnreachable):
            await it.link.kill("engine-0")


async def test_word_of_the_agent_ends_children_and_runner_with_its_code(tmp_path: Path) -> None:
    async with container(tmp_path) as it:
        await it.link.start("engine-0", SLEEP, {})
        await it.link.exit(0)
        async with asyncio.timeout(DEADLINE_S):
            assert 0 == await it.process.wait()


async def test_sigterm_is_reported_to_the_agent_and_children_go_on_until_its_word(tmp_path: Path) -> None:
    async with container(tmp_path, grace_s=600) as it:
        incarnation = await it.link.start("engine-0", SLEEP, {})
        it.process.terminate()
        assert RunnerTerminating(event="terminating", children_end_in_s=580) == await it.until(RunnerTerminating)
        with pytest.raises(RunnerRefused, match="Terminating"):
            await it.link.start("trainer-0", SLEEP, {})
        await it.link.exit(143)
        assert -signal.SIGKILL == (await it.exited(incarnation)).code
        async with asyncio.timeout(DEADLINE_S):
            assert 143 == await it.process.wait()


async def test_who_ends_all_of_a_container_is_reported_before_the_exits(tmp_path: Path) -> None:
    """A child that got the signal too has not failed."""
    async with container(tmp_path) as it:
        script = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(f'{{os.getpid()}}\\n'); time.sleep(600)"
        incarnation = await it.link.start("trainer-0", [sys.executable, "-c", script], {})
        pid = int(await file_line(tmp_path / "pid"))
        it.process.send_signal(signal.SIGSTOP)
        stat = Path(f"/proc/{it.process.pid}/stat")
        await until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")  # else it still sees the end
        os.kill(pid, signal.SIGTERM)
        await until(lambda: not is_alive(pid))
        it.process.terminate()
        it.process.send_signal(signal.SIGCONT)
        assert -signal.SIGTERM == (await it.exited(incarnation)).code
        kinds = [type(event) for event in it.events]
        assert kinds.index(RunnerTerminating) < kinds.index(ChildExited)


async def test_children_end_near_the_end_of_grace_without_any_word(tmp_path: Path) -> None:
    async with container(tmp_path, grace_s=runner.RESERVE_S + 0.2) as it:
        incarnation = await it.link.start("engine-0", SLEEP, {})
        it.process.terminate()
        assert -signal.SIGKILL == (await it.exited(incarnation)).code
        async with asyncio.timeout(DEADLINE_S):
            assert 143 == await it.process.wait()


async def test_socket_is_for_owner_and_group_alone(tmp_path: Path) -> None:
    async with container(tmp_path) as it:
        assert 0o660 == stat.S_IMODE(it.socket.stat().st_mode)


ELSEWHERE = "os.fork() and time.sleep(600); os.setsid();"  # in a session of its own


@pytest.mark.parametrize("detour", ["", ELSEWHERE, f"{ELSEWHERE} os.fork() and os._exit(0);"])
async def test_socket_turns_away_what_the_runner_started(tmp_path: Path, detour: str) -> None:
    """People's trainer code runs in the same group, and could have killed the engine or ended the container."""
    async with container(tmp_path) as it:
        script = (
            f"import os, socket, time; {detour} it = socket.socket(socket.AF_UNIX); it.connect({str(it.socket)!r});"
            f"said = it.recv(4096); open({str(tmp_path / 'said')!r}, 'w').write(f'{{len(said)}}\\n')"
        )
        await it.link.start("trainer-0", [sys.executable, "-c", script], {})
        assert "0" == await file_line(tmp_path / "said")
        assert await it.link.start("engine-0", SLEEP, {}), "the agent's own connection goes on"


BAD = [
    b"nonsense\n",
    b"[]\n",
    b"[" * 200_000 + b"\n",
    b'{"id":1,"op":"fly"}\n',
    b'{"id":1,"op":"start"}\n',
    b'{"id":1,"op":"start","name":"x","argv":[]}\n',
    b'{"id":1,"op":"start","name":"x","argv":["a\\u0000"]}\n',
    b'{"id":1,"op":"exit","code":Infinity}\n',
]


@pytest.mark.parametrize("line", BAD, ids=range(len(BAD)))
async def test_bad_request_is_answered_and_the_runner_goes_on(tmp_path: Path, line: bytes) -> None:
    async with container(tmp_path) as it:
        reader, writer = await asyncio.open_unix_connection(it.socket)
        writer.write(line)
        async with asyncio.timeout(DEADLINE_S):
            assert b'"event":"hello"' in await reader.readline()
            assert b'"ok":false' in await reader.readline()
        writer.close()
        await writer.wait_closed()
        assert it.process.returncode is None


@pytest.mark.parametrize("grace_s", [math.nan, math.inf, -1.0])
async def test_grace_that_is_no_time_is_refused(tmp_path: Path, grace_s: float) -> None:
    async with container(tmp_path) as it:
        incarnation = await it.link.start("engine-0", SLEEP, {})
        with pytest.raises(RunnerRefused, match="BadRequest"):
            await it.link.stop("engine-0", grace_s=grace_s)
        await it.link.kill("engine-0")
        await it.exited(incarnation)


async def test_end_of_a_child_and_of_its_output_may_be_seen_together(tmp_path: Path) -> None:
    """The runner died of it, and all processes of the container with it: it read an output that it had closed."""
    async with container(tmp_path) as it:
        both = f"sleep 600 & echo $$ $! > {tmp_path}/pids; wait"
        victim = await it.link.start("engine-0", ["sh", "-c", both], {})
        pids = list(map(int, (await file_line(tmp_path / "pids")).split()))
        it.process.send_signal(signal.SIGSTOP)
        await until(lambda: "T" == state(it.process.pid))
        wake_up(it.process.pid)  # as a child of another group does that has just ended
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        await until(lambda: not any(map(is_alive, pids)))
        it.process.send_signal(signal.SIGCONT)
        assert -signal.SIGKILL == (await it.exited(victim)).code
        assert await it.link.start("engine-0", SLEEP, {}), "the runner goes on"


async def test_what_left_the_group_of_a_child_does_not_hold_up_its_end(tmp_path: Path) -> None:
    """It went on writing into the child's output, which the runner read to an end that never came."""
    async with container(tmp_path) as it:
        started = f"env -i setsid yes & echo $! > {tmp_path}/draft; mv {tmp_path}/draft {tmp_path}/pid"
        incarnation = await it.link.start("trainer-0", ["sh", "-c", started], {})
        assert 0 == (await it.exited(incarnation)).code
        pid = int(await file_line(tmp_path / "pid"))
        await until(lambda: not is_alive(pid))


async def test_host_memory_is_that_of_a_child_and_all_that_it_started(tmp_path: Path) -> None:
    """A worker in a group of its own holds memory, too, as those of an engine do."""
    holds = f"held = bytearray(b'x') * (64 << 20); open({str(tmp_path / 'up')!r}, 'w').write('up\\n');"
    worker = f"import time; {holds} time.sleep(600)"
    leader = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {worker!r}], start_new_session=True)"
    async with container(tmp_path) as it:
        await it.link.start("trainer-0", SLEEP, {})
        await it.link.start("engine-0", [sys.executable, "-c", leader], {})
        await file_line(tmp_path / "up")
        found = await it.link.memory()
        assert {"engine-0", "trainer-0"} == set(found)
        assert 64 << 20 < found["engine-0"] < 256 << 20
        assert 0 < found["trainer-0"] < 64 << 20


async def test_device_memory_is_unmeasured_without_a_driver(tmp_path: Path) -> None:
    async with container(tmp_path, env={"LD_LIBRARY_PATH": "", "FAKE_DEVICE": ""}) as it:
        found = await it.link.devices()
        sizes = [(device.used_bytes or 0, device.total_bytes or 0) for device in found]
        assert all(0 < used <= total for used, total in sizes), "a real one"


async def test_device_memory_is_what_the_driver_says_of_those_who_live(tmp_path: Path) -> None:
    device = FakeDevice(tmp_path)
    async with container(tmp_path, env=device.environment) as it:
        assert (Memory(index=0, total_bytes=TOTAL_BYTES, used_bytes=0),) == await it.link.devices()
        device.hold(3 * GIB)
        script = (
            f"import os, time; open(os.environ['FAKE_DEVICE'] + f'/{{os.getpid()}}', 'w').write('{40 * GIB}');"
            f"open({str(tmp_path / 'up')!r}, 'w').write('up\\n'); time.sleep(600)"
        )
        incarnation = await it.link.start("engine-0", [sys.executable, "-c", script], {})
        await file_line(tmp_path / "up")
        assert 43 * GIB == (await it.link.devices())[0].used_bytes
        await it.link.kill("engine-0")
        await it.exited(incarnation)
        assert 3 * GIB == (await it.link.devices())[0].used_bytes


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("ecc", "its memory had 2 errors that can't be corrected"),
        ("remap", "a row of its memory could not be remapped"),
        ("lost", "it has fallen off the bus"),
    ],
)
async def test_device_that_breaks_while_its_container_runs_has_a_fault(tmp_path: Path, fault: str, words: str) -> None:
    device = FakeDevice(tmp_path, count=2)
    device.breaks("ecc", device=1, count=3)
    async with container(tmp_path, env=device.environment) as it:
        assert [None, None] == [each.fault for each in await it.link.devices()], "it was so before"
        device.breaks(fault, device=1, count=5)
        found = await it.link.devices()
        assert [None, words] == [each.fault for each in found]
        assert (fault == "lost") is (found[1].used_bytes is None)
        assert TOTAL_BYTES == found[0].total_bytes


@pytest.mark.parametrize("fault", ["ecc", "remap", "lost"])
async def test_fault_that_a_device_had_before_its_container_began_is_none_of_it(tmp_path: Path, fault: str) -> None:
    """Its pod would be made again for ever, each time on the same device."""
    device = FakeDevice(tmp_path)
    device.breaks(fault)
    async with container(tmp_path, env=device.environment) as it:
        assert [None] == [each.fault for each in await it.link.devices()]


async def test_device_of_which_the_driver_reports_an_xid_that_means_it_is_bad_has_a_fault(tmp_path: Path) -> None:
    device = FakeDevice(tmp_path, count=3)
    device.reports(13, 79, device=2)
    async with container(tmp_path, env=device.environment) as it:
        assert [None] * 3 == [each.fault for each in await it.link.devices()], "it was so before"
        device.reports(13, 31, 43, 45, 68, 94, 109, device=0)  # of programs, or contained
        device.reports(45, 119, 45, 120, device=1)
        for _ in range(2):  # it stays so
            assert [None, "its driver reported XID 119", None] == [each.fault for each in await it.link.devices()]


async def test_fault_that_the_driver_counts_says_more_than_its_xid(tmp_path: Path) -> None:
    device = FakeDevice(tmp_path)
    async with container(tmp_path, env=device.environment) as it:
        device.reports(79)
        device.breaks("lost")
        assert ["it has fallen off the bus"] == [each.fault for each in await it.link.devices()]


async def test_driver_that_counts_no_errors_tells_of_the_memory(tmp_path: Path) -> None:
    """An older one has no such functions."""
    device = FakeDevice(tmp_path, functions="OLD")
    async with container(tmp_path, env=device.environment) as it:
        assert (Memory(index=0, total_bytes=TOTAL_BYTES, used_bytes=0),) == await it.link.devices()


@pytest.mark.parametrize(
    ("own", "given", "seen"),
    [
        ("", [2, 3], "2,3"),
        ("GPU-a,GPU-b,GPU-c", [0, 2], "GPU-a,GPU-c"),  # as a device plugin may have it
        ("5,7", [], "5,7"),
    ],
)
async def test_child_sees_the_devices_that_it_is_given_of_those_that_the_container_has(
    tmp_path: Path, own: str, given: list[int], seen: str
) -> None:
    async with container(tmp_path, env={"CUDA_VISIBLE_DEVICES": own} if own else {}) as it:
        script = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ.get('CUDA_DEVICE_ORDER'))"
        exited = await it.exited(await it.link.start("engine-1", [sys.executable, "-c", script], {}, devices=given))
        assert (f"{seen} {'PCI_BUS_ID' if given else None}",) == exited.tail
        if own:
            with pytest.raises(RunnerRefused, match="names 3 devices" if "GPU" in own else "names 2 devices"):
                await it.link.start("engine-2", SLEEP, {}, devices=[3])


def test_grace_of_the_pod_is_what_the_runner_takes_it_for() -> None:
    assert runner.DEFAULT_GRACE_S == resources.GPU_GRACE_S


def test_runner_imports_nothing_but_the_standard_library() -> None:
    """It runs in a vendor's image: isolated from site-packages it must still load."""
    subprocess.run(
        [oldest_python(), "-I", "-S", "-c", f"import runpy; runpy.run_path({runner.__file__!r})"], check=True
    )


def test_runner_keeps_to_the_syntax_of_old_pythons() -> None:
    ast.parse(Path(runner.__file__).read_text(), feature_version=(3, 9))


def wake_up(pid: int) -> None:
    """Wake the runner as a signal does, which is the first thing that it finds when it looks."""
    ends = [(str(fd.readlink()), fd) for fd in Path(f"/proc/{pid}/fd").iterdir()]
    pipes = sorted(end for end in ends if end[0].startswith("pipe:"))
    own = next(second[1] for first, second in itertools.pairwise(pipes) if first[0] == second[0])
    own.write_bytes(bytes([signal.SIGCHLD]))


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not is_true():  # noqa: ASYNC110 - another process makes it true
            await asyncio.sleep(0.01)


async def file_line(path: Path) -> str:
    """The first line of a file that another process writes."""
    await until(lambda: path.exists() and path.read_text().endswith("\n"))
    return await asyncio.to_thread(lambda: path.read_text().splitlines()[0])
