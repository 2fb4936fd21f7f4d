#!/usr/bin/env python3
"""The runner starts, signals and reaps the processes of a GPU container, as its entry point.

It is one file on the standard library of Python 3.9 or newer: copied into a vendor's image at run time, it needs only a
Python there. It decides nothing: the agent decides what runs. Children outlive the agent's restarts, never the runner.
Each child is a process group with an environment of its own, and gets an incarnation id; a child is gone when no
process that it started is left, in its group or in another one, not when its leader died: each of them may hold device
memory. COLOCATE_INCARNATION in a process's environment names its child.

A child's output goes to standard output, each line behind `[name]`, and the last lines are kept for messages. People
read the container's standard output, so values that the agent declares secret are replaced. When nobody reads it, as
while a container runtime is being replaced, neither runner nor children wait: past MAX_UNREAD, lines are dropped and
counted.

The socket is `COLOCATE_RUNNER_SOCKET`, or /run/colocate/sock/runner.sock, mode 0660. Processes started here are turned
away: only the agent may use it, one at a time, and a newer connection replaces an older one. Messages are JSON lines of
at most MAX_LINE bytes. The first one is

    {"event": "hello", "protocol": 1, "runner": ID, "terminating": false, "children": [CHILD, ...]}

CHILD is the newest incarnation of a name: {"name", "incarnation", "running", "pid", "code", "tail", "killed"}; `code`
is the exit code once the child is gone (negative: signal), `tail` its last lines, `killed` as in the event of its exit.
Requests carry an `id`, answers repeat it:

    {"id": 1, "op": "start", "name": "engine-0", "argv": [...], "env": {"A": "b", "C": null}, "secrets": ["..."],
     "devices": [0, 1]}
        -> {"id": 1, "ok": true, "incarnation": ID}     env is laid over the container's; null removes a variable;
                                                        devices: those the child sees, all if there are none
    {"id": 2, "op": "stop", "name": "engine-0", "grace_s": 5}    SIGTERM, after grace_s SIGKILL; answered at once
    {"id": 3, "op": "kill", "name": "engine-0"}                  SIGKILL
    {"id": 4, "op": "devices"} -> {"id": 4, "ok": true, "devices": [{"index", "total_bytes", "used_bytes", "fault"}]}
                                                        or null; sizes are null of a device that is lost
    {"id": 6, "op": "memory"} -> {"id": 6, "ok": true, "memory": {"engine-0": BYTES}}  of the host, each child
    {"id": 5, "op": "exit", "code": 0}   ends all children, then itself with that code

The answer to a refused request is {"id", "ok": false, "error", "message"}. Events come without a request:

    {"event": "exited", "name", "incarnation", "code", "tail", "killed"}   no process of the child is left; killed:
                                                                           on request, and its leader lived until then
    {"event": "terminating", "children_end_in_s"}                          the container got SIGTERM

On SIGTERM children go on, because native sidecars get it last: the agent hands partial samples back first and then
requests `exit`. Without that request children are ended RESERVE_S before the end of `COLOCATE_GRACE_S` (60).

At its start the runner empties the directories of `COLOCATE_WIPED`: the pod's /dev/shm and /tmp, whose files outlive a
container.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import json
import os
import pathlib
import resource
import select
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from typing import Any

SOCKET = "COLOCATE_RUNNER_SOCKET"
DEFAULT_SOCKET = "/run/colocate/sock/runner.sock"
GRACE = "COLOCATE_GRACE_S"
DEFAULT_GRACE_S = 60.0
WIPED = "COLOCATE_WIPED"
MARK = "COLOCATE_INCARNATION"
UNCORRECTED, SINCE_LOADED, GPU_IS_LOST = 1, 0, 15  # nvml.h: type of error, of counter, and a return code
XID_EVENTS = ctypes.c_ulonglong(8)  # nvml.h: nvmlEventTypeXidCriticalError
# After these, NVIDIA's catalog of XIDs has the device reset, its machine restarted or its links examined. Others are
# mostly a program's fault or contained; 109 is often one, and 144 to 150 are grave or not under the same number.
BAD_XIDS = frozenset({46, 48, 62, 64, 74, 79, 95, 110, 119, 120, 136, 140, 143, 155, 156, 158})
MAX_EVENTS = 1000  # in one reading: more are left for the next
DEVICES, DEVICE_ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
RESERVE_S = 20.0  # last part of the grace period, for children to end
MAX_GRACE_S = 24 * 3600.0
PROTOCOL = 1
MAX_LINE = 1024 * 1024  # bytes of a request
MAX_UNSENT = 4 * 1024 * 1024  # bytes to an agent that does not read: past it the connection is dropped
MAX_UNREAD = 4 * 1024 * 1024  # bytes of the runner's output
MAX_OUTPUT_LINE = 8 * 1024  # bytes of a child's line; the rest becomes a line of its own
READ_BYTES = 64 * 1024  # at a time: the capacity of a pipe
LAST_READS = 4  # from a child that is gone: a process that left its group may hold the pipe and write for ever
MANY_FILES = 1_048_576  # open at a time, where there is no lower limit
TAIL_LINES = 40
TAIL_LINE_CHARS = 400
KILL_AGAIN_S = 1.0  # a process that forks while its group is killed can be missed
LOOKS, LOOK_AGAIN_S = 50, 0.001  # reads of the environment of a process that shows none
EXIT_BUDGET_S = 10.0  # from `exit` to the runner's own end, even if a child can't be reaped (device driver)
LAST_WORDS_S = 2.0  # after that, for a reader to take the unread output

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


class CommandRefused(Exception):
    """The runner refuses a request. `error` is a stable name for programs."""

    def __init__(self, error: str, message: str) -> None:
        super().__init__(message)
        self.error = error


class Output:
    """Output writes to standard output, which must be set non-blocking, so that no writer ever waits."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.unread = bytearray()
        self.lost = 0  # lines

    def write(self, line: str) -> None:
        if len(self.unread) > MAX_UNREAD:
            self.lost += 1
            return
        self.unread += line.encode("utf-8", "replace") + b"\n"
        self.flush()

    def flush(self) -> None:
        try:
            while self.unread:
                del self.unread[: os.write(self.descriptor, self.unread)]
        except BlockingIOError:
            return
        except OSError:  # its reader is gone for good: children go on
            self.unread.clear()
        if self.lost:
            lines, self.lost = self.lost, 0
            log("output lost", lines=lines, reason="nobody read the container's output in time")

    def end(self, within_s: float) -> None:
        deadline = time.monotonic() + within_s
        while self.unread and select.select([], [self.descriptor], [], max(0.0, deadline - time.monotonic()))[1]:
            self.flush()


OUTPUT = Output(1)


class Child:
    """A Child is one incarnation of a name."""

    def __init__(self, name: str, incarnation: str, process: subprocess.Popen[bytes], secrets: list[bytes]) -> None:
        assert process.stdout is not None
        self.name = name
        self.incarnation = incarnation
        self.process = process
        self.output = process.stdout
        self.secrets = secrets
        self.longest_secret = max(map(len, secrets), default=0)
        self.partial = b""
        self.tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
        self.code: int | None = None  # exit code of the leader, once reaped
        self.gone = False  # no process of it is left
        self.killed = False  # on request, before its leader had ended
        self.kill_at: float | None = None
        self.strays: dict[int, str] = {}  # start time by pid of processes that left its group and have not ended

    def signal(self, number: int) -> None:
        if self.gone:  # its group id may be in use again
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def group_is_empty(self) -> bool:
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return False

    def read_output(self) -> bool:
        """Pass on the child's output, and return False at its end."""
        try:
            data = os.read(self.output.fileno(), READ_BYTES)
        except BlockingIOError:
            return True
        written = self.partial + data
        for secret in self.secrets:
            written = written.replace(secret, b"***")
        lines = written.split(b"\n")
        self.partial = lines.pop()
        while len(self.partial) > MAX_OUTPUT_LINE + self.longest_secret:  # a secret that begins at the end stays whole
            lines.append(self.partial[:MAX_OUTPUT_LINE])
            self.partial = self.partial[MAX_OUTPUT_LINE:]
        if not data and self.partial:
            lines.append(self.partial)
            self.partial = b""
        for line in lines:
            self._pass_on(line)
        return bool(data)

    def _pass_on(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]  # keeps a progress bar's last state
        self.tail.append(text[:TAIL_LINE_CHARS])
        OUTPUT.write(f"[{self.name}] {text}")

    def status(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "incarnation": self.incarnation,
            "running": not self.gone,
            "pid": self.process.pid,
            "code": self.code if self.gone else None,
            "tail": list(self.tail) if self.gone else [],
            "killed": self.killed,
        }


class AgentConnection:
    """An AgentConnection is the socket connection of the agent."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.received = b""
        self.unsent = b""

    def requests(self) -> list[bytes] | None:
        """Return the whole lines that have arrived; None if the agent is gone or sends too much."""
        try:
            data = self.connection.recv(65536)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        *lines, self.received = (self.received + data).split(b"\n")
        return None if len(self.received) > MAX_LINE else lines

    def flush(self) -> bool:
        """Send as much as the socket takes, and return False if the agent is gone or does not read."""
        try:
            while self.unsent:
                self.unsent = self.unsent[self.connection.send(self.unsent) :]
        except BlockingIOError:
            return len(self.unsent) <= MAX_UNSENT
        except OSError:
            return False
        return True


class Runner:
    """The Runner is one loop in one thread: no method runs twice at the same time."""

    def __init__(self, socket_path: str, grace_s: float) -> None:
        self.id = uuid.uuid4().hex[:16]
        self.grace_s = grace_s
        self.children: dict[str, Child] = {}  # newest incarnation of each name
        self.groups: dict[int, Child] = {}  # children not yet gone, by pid of the leader
        self.agent: AgentConnection | None = None
        self.terminate_at: float | None = None  # when children are ended without a request of the agent
        self.exit_code: int | None = None
        self.exit_by: float | None = None
        self.xids = Xids()  # first: so none falls between
        self.devices_before = {device["index"]: device for device in read_devices() or ()}
        self.selector = selectors.DefaultSelector()
        self.listener = listen(socket_path)
        self.selector.register(self.listener, selectors.EVENT_READ, self._accept)
        self.wakeup = wake_on_signals()
        self.selector.register(self.wakeup, selectors.EVENT_READ, self._on_signal)
        self.output_waits = False  # output waits for its reader

    def run(self) -> int:
        """Serve until the runner is to exit, and return the exit code."""
        while True:
            self._mind_output()
            for key, _ in self.selector.select(self._until_next_deadline()):
                handler: Callable[[], None] = key.data
                handler()
            self._meet_deadlines()
            if self.exit_code is not None and (not self.groups or time.monotonic() >= (self.exit_by or 0)):
                self._send_all()
                return self.exit_code

    def _mind_output(self) -> None:
        if bool(OUTPUT.unread) == self.output_waits:
            return
        self.output_waits = not self.output_waits
        if self.output_waits:
            self.selector.register(OUTPUT.descriptor, selectors.EVENT_WRITE, OUTPUT.flush)
        else:
            self.selector.unregister(OUTPUT.descriptor)

    # ------------------------------------------------------------------------------------------------ the agent
    def _accept(self) -> None:
        connection, _ = self.listener.accept()
        if was_started_here(connection):
            log("connection refused", reason="only the agent may send requests to the runner")
            connection.close()
            return
        self._drop_agent()
        self.agent = AgentConnection(connection)
        self.selector.register(connection, selectors.EVENT_READ, self._on_agent)
        self._send(
            event="hello",
            protocol=PROTOCOL,
            runner=self.id,
            terminating=self.terminate_at is not None,
            children=[child.status() for child in self.children.values()],
        )

    def _drop_agent(self) -> None:
        if self.agent is not None:
            self.selector.unregister(self.agent.connection)
            self.agent.connection.close()
            self.agent = None

    def _on_agent(self) -> None:
        agent = self.agent
        if agent is None:
            return
        lines = agent.requests()
        if lines is None:
            self._drop_agent()
            return
        for line in lines:
            self._answer(line)
        self._send_all()

    def _answer(self, line: bytes) -> None:
        request: dict[str, Any] = {}
        try:
            parsed = json.loads(line)
            request = parsed if isinstance(parsed, dict) else {}
            self._send(id=request.get("id"), ok=True, **self._carry_out(request))
        except CommandRefused as refusal:
            self._send(id=request.get("id"), ok=False, error=refusal.error, message=str(refusal))
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            self._send(id=request.get("id"), ok=False, error="BadRequest", message=repr(error))

    def _carry_out(self, request: dict[str, Any]) -> dict[str, Any]:
        op = request["op"]
        if op == "start":
            return {"incarnation": self._start(request)}
        if op == "stop":
            child, grace_s = self._child(request["name"]), float(request["grace_s"])
            if not 0 <= grace_s <= MAX_GRACE_S:
                raise CommandRefused("BadRequest", f"grace_s is {grace_s}: 0 to {MAX_GRACE_S:.0f} is a time")
            child.signal(signal.SIGTERM)
            child.kill_at = time.monotonic() + grace_s
            return {}
        if op == "kill":
            child = self._child(request["name"])
            self._reap()  # whoever noticed that it had ended may ask before its end is known here
            child.killed = child.killed or child.code is None
            child.signal(signal.SIGKILL)
            child.kill_at = time.monotonic() + KILL_AGAIN_S
            return {}
        if op == "devices":
            return {"devices": read_devices(self.devices_before, self.xids.read())}
        if op == "memory":
            return {"memory": host_memory({child.name: child.incarnation for child in self.children.values()})}
        if op == "exit":
            self._end(int(request["code"]))
            return {}
        raise CommandRefused("UnknownOperation", f"operation {op!r} is not known to a runner of protocol {PROTOCOL}")

    def _child(self, name: str) -> Child:
        child = self.children.get(name)
        if child is None:
            raise CommandRefused("NoSuchChild", f"{name} was never started by this runner")
        return child

    def _send(self, **message: Any) -> None:
        if self.agent is not None:
            self.agent.unsent += json.dumps(message, separators=(",", ":")).encode() + b"\n"
            self._send_all()

    def _send_all(self) -> None:
        agent = self.agent
        if agent is None:
            return
        if not agent.flush():
            self._drop_agent()
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if agent.unsent else 0)
        self.selector.modify(agent.connection, wanted, self._on_agent)

    # ------------------------------------------------------------------------------------------------ children
    def _start(self, request: dict[str, Any]) -> str:
        name, argv = str(request["name"]), [str(word) for word in request["argv"]]
        old = self.children.get(name)
        if old is not None and not old.gone:
            raise CommandRefused("AlreadyRunning", f"{name} runs as incarnation {old.incarnation}: stop it first")
        if self.exit_code is not None or self.terminate_at is not None:
            raise CommandRefused("Terminating", f"{name} is not started: the container ends")
        env = dict(os.environ)
        for variable, value in request.get("env", {}).items():
            if value is None:
                env.pop(variable, None)
            else:
                env[variable] = str(value)
        if devices := [int(index) for index in request.get("devices", [])]:
            env.update(seen_devices(devices))
        env[MARK] = incarnation = uuid.uuid4().hex[:16]
        secrets = [str(secret).encode() for secret in request.get("secrets", []) if secret]
        try:
            process = subprocess.Popen(
                argv,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_runner,
            )
        except OSError as error:
            raise CommandRefused("CannotStart", f"{argv[0]}: {error}") from error
        child = Child(name, incarnation, process, secrets)
        os.set_blocking(child.output.fileno(), False)
        self.selector.register(child.output, selectors.EVENT_READ, lambda: self._on_output(child))
        self.children[name] = self.groups[process.pid] = child
        log("child started", child=name, incarnation=child.incarnation, pid=process.pid)
        return child.incarnation

    def _on_output(self, child: Child) -> None:
        if child.output.closed:  # closed at its end, earlier in the same turn of the loop
            return
        if not child.read_output():
            self._close_output(child)

    def _close_output(self, child: Child) -> None:
        if not child.output.closed:
            self.selector.unregister(child.output)
            child.output.close()

    def _reap(self) -> None:
        """Reap every dead process: leaders, their orphans, and orphans that the runner adopts as the first process."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            child = self.groups.get(pid)
            if child is not None and child.code is None:
                child.code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
                child.process.returncode = child.code
                child.signal(signal.SIGKILL)  # a rank without its leader is useless and holds memory
                child.kill_at = time.monotonic() + KILL_AGAIN_S
        for child in list(self.groups.values()):
            if child.code is not None and child.group_is_empty() and not kill_strays(child.incarnation, child.strays):
                self._report_exit(child)

    def _report_exit(self, child: Child) -> None:
        for _ in range(LAST_READS):
            if child.output.closed or not select_readable(child.output.fileno()):
                break
            self._on_output(child)
        self._close_output(child)
        child.gone = True
        child.kill_at = None
        del self.groups[child.process.pid]
        log("child exited", child=child.name, incarnation=child.incarnation, code=child.code)
        status = child.status()
        self._send(event="exited", **{key: status[key] for key in ("name", "incarnation", "code", "tail", "killed")})

    # ------------------------------------------------------------------------------------------------ the end
    def _on_signal(self) -> None:
        numbers = os.read(self.wakeup, 1024)
        is_signalled = (signal.SIGTERM in numbers or signal.SIGINT in numbers) and self.terminate_at is None
        if is_signalled:  # reported before the exits of children that got the signal too: they have not failed
            wait_s = max(0.0, self.grace_s - RESERVE_S)
            self.terminate_at = time.monotonic() + wait_s
            log("runner terminating", children_end_in_s=wait_s)
            self._send(event="terminating", children_end_in_s=wait_s)
        self._reap()
        if is_signalled and not self.groups:
            self._end(128 + signal.SIGTERM)

    def _end(self, code: int) -> None:
        if self.exit_code is None:
            self.exit_code = code
            self.exit_by = time.monotonic() + EXIT_BUDGET_S
            log("runner ending", code=code)
        for child in self.groups.values():
            child.signal(signal.SIGKILL)
            child.kill_at = time.monotonic() + KILL_AGAIN_S

    def _until_next_deadline(self) -> float | None:
        deadlines = [child.kill_at for child in self.groups.values()]
        deadlines += [self.exit_by, self.terminate_at if self.exit_code is None else None]
        known = [deadline for deadline in deadlines if deadline is not None]
        return max(0.0, min(known) - time.monotonic()) if known else None

    def _meet_deadlines(self) -> None:
        now = time.monotonic()
        for child in list(self.groups.values()):
            if child.kill_at is not None and now >= child.kill_at:
                child.signal(signal.SIGKILL)
                child.kill_at = now + KILL_AGAIN_S
        if self.terminate_at is not None and now >= self.terminate_at and self.exit_code is None:
            self._end(128 + signal.SIGTERM)
        if self.groups:
            self._reap()


def kill_strays(incarnation: str, known: dict[int, str]) -> bool:
    """Kill what is left of a child whose group is empty, and return whether anything is. Launchers give their workers
    groups of their own.

    known: processes found before, which show no mark any more while they end, and still hold their devices.
    """
    mark = f"{MARK}={incarnation}".encode()
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone since, or another user's
            if mark in environment(process):
                pid = int(process.name)
                known[pid] = begun(pid) or ""
                os.kill(pid, signal.SIGKILL)
    for pid in [pid for pid, begin in known.items() if begun(pid) != begin]:
        del known[pid]
    return bool(known)


def host_memory(incarnations: dict[str, str]) -> dict[str, int]:
    """Return the bytes of host memory that all processes of each child hold; without children that have none.

    incarnations: by name. Files that the kernel keeps in memory by itself are left out; memory that several processes
    of a child share counts for each of them.
    """
    held: dict[str, int] = {}
    marks = {f"{MARK}={incarnation}".encode(): name for name, incarnation in incarnations.items()}
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone since, or another user's
            for name in {marks[entry] for entry in environment(process) if entry in marks}:
                lines = (process / "status").read_text().splitlines()
                kib = sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:")))
                held[name] = held.get(name, 0) + 1024 * kib
    return held


def environment(process: pathlib.Path) -> list[bytes]:
    """Return the environment of a process, by its directory in /proc. Raises OSError.

    A process shows none for the moment in which it becomes another program (Linux, fs/proc/base.c: environ_read).
    """
    for _ in range(LOOKS):
        shown = (process / "environ").read_bytes()
        if shown:
            break
        (process / "exe").readlink()  # raises for an ended or a kernel process
        time.sleep(LOOK_AGAIN_S)
    return shown.split(b"\0")


def begun(pid: int) -> str | None:
    """Return a process's start time, which no other process of its pid has; None if only its exit code is left."""
    try:
        state, *others = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        threads = [*pathlib.Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return None
    return None if state in ("Z", "X") and len(threads) == 1 else others[18]


def listen(path: str) -> socket.socket:
    with contextlib.suppress(FileNotFoundError):
        pathlib.Path(path).unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    pathlib.Path(path).chmod(0o660)  # the agent has another user id and the pod's group
    listener.listen(4)
    listener.setblocking(False)
    return listener


def was_started_here(connection: socket.socket) -> bool:
    """Return whether a child or its descendant is at the other end: trainers run users' code, in the pod's group."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, user = map(int, struct.unpack("3i", credentials)[:2])
    if user != os.getuid():  # the agent's container has a user of its own; privileges can't be gained here
        return False
    while pid not in (0, os.getpid()):  # 0: outside this process namespace
        try:
            pid = int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return True  # it has ended already, so it is not the agent
    return pid != 0


def seen_devices(indices: list[int]) -> dict[str, str]:
    """Return the variables by which a child sees these devices of the container alone, numbered as NVML does."""
    own = [device for device in os.environ.get(DEVICES, "").split(",") if device]
    if own and max(indices) >= len(own):
        raise CommandRefused("NoSuchDevice", f"{DEVICES} of the container names {len(own)} devices, not {indices}")
    return {DEVICES: ",".join(own[index] if own else str(index) for index in indices), DEVICE_ORDER: "PCI_BUS_ID"}


def wake_on_signals() -> int:
    """Return a descriptor that becomes readable with the numbers of the signals that arrived."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    return reader


def select_readable(descriptor: int) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        return bool(selector.select(0))


LIBC = ctypes.CDLL(None)


def prctl(option: int, value: int) -> None:
    LIBC.prctl(option, value, 0, 0, 0)


def die_with_runner() -> None:
    """Tie the child's life to the runner's, in the child before exec: nobody could stop a child that outlives it."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class NvmlMemory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class NvmlEvent(ctypes.Structure):
    _fields_ = [
        ("device", ctypes.c_void_p),
        ("type", ctypes.c_ulonglong),
        ("xid", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


class Xids:
    """Xids are those that the driver has reported since the container began, as far as the device or a link is bad.

    The driver keeps them until they are read, which never waits; for that NVML stays open until the container ends.
    """

    def __init__(self) -> None:
        self.bad: dict[int, int] = {}  # the first of each device, by index
        self.indices: dict[int | None, int] = {}  # by handle
        self.events = ctypes.c_void_p()
        self.nvml = nvml = open_nvml()
        if not (hasattr(nvml, "nvmlEventSetWait_v2") and nvml.nvmlEventSetCreate(ctypes.byref(self.events)) == 0):
            return  # no driver, or one that tells of none
        for index in range(count_devices(nvml)):
            handle = ctypes.c_void_p()
            code = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle))
            if code == 0 and nvml.nvmlDeviceRegisterEvents(handle, XID_EVENTS, self.events) == 0:
                self.indices[handle.value] = index

    def read(self) -> dict[int, int]:
        """Return the first XID of each device that is bad by one, by index."""
        event = NvmlEvent()
        for _ in range(MAX_EVENTS if self.indices else 0):
            if self.nvml.nvmlEventSetWait_v2(self.events, ctypes.byref(event), ctypes.c_uint(0)) != 0:
                break
            if event.xid in BAD_XIDS and event.device in self.indices:
                self.bad.setdefault(self.indices[event.device], event.xid)
        return self.bad


def open_nvml() -> Any:
    """Return NVML, which counts how often it is opened and shut down; None if no NVIDIA driver answers."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return nvml if nvml.nvmlInit_v2() == 0 else None


def count_devices(nvml: Any) -> int:
    count = ctypes.c_uint()
    return count.value if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0 else 0


def read_devices(
    before: dict[int, dict[str, Any]] | None = None, xids: dict[int, int] | None = None
) -> list[dict[str, Any]] | None:
    """Return the memory of each GPU of this container, in bytes, for all users, and what has become of it.

    before: what was read when the container began, by index: only what has gone wrong since then is a fault, because
    nobody else would give the container another device. xids: reported since then. None if no NVIDIA driver answers.
    """
    nvml = open_nvml()
    if nvml is None:
        return None
    try:
        devices = [read_device(nvml, index) for index in range(count_devices(nvml))]
    finally:
        nvml.nvmlShutdown()
    if before is not None:
        for device in devices:
            index = device["index"]
            device["fault"] = new_fault(device, before.get(index, device), (xids or {}).get(index))
    return devices


def read_device(nvml: Any, index: int) -> dict[str, Any]:
    """Return what the driver says of one device. What it doesn't say, or does not know how to count, is None."""
    handle, memory, errors = ctypes.c_void_p(), NvmlMemory(), ctypes.c_ulonglong()
    rows = [ctypes.c_uint() for _ in range(4)]  # corrected, uncorrected, pending, and whether one could not be remapped
    code = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle))
    code = code or nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))

    def answers(function: str, *arguments: Any) -> bool:
        return code == 0 and hasattr(nvml, function) and getattr(nvml, function)(handle, *arguments) == 0

    counts = answers("nvmlDeviceGetTotalEccErrors", UNCORRECTED, SINCE_LOADED, ctypes.byref(errors))
    remaps = answers("nvmlDeviceGetRemappedRows", *map(ctypes.byref, rows))
    return {
        "index": index,
        "total_bytes": memory.total if code == 0 else None,
        "used_bytes": memory.used if code == 0 else None,
        "uncorrected": errors.value if counts else None,
        "is_unmappable": bool(rows[3].value) if remaps else None,
        "is_lost": code == GPU_IS_LOST,
    }


def new_fault(now: dict[str, Any], before: dict[str, Any], xid: int | None) -> str | None:
    """Return what is wrong with a device that was not before, in words. xid: reported of it since."""
    if now["is_lost"] and not before["is_lost"]:
        return "it has fallen off the bus"
    if now["is_unmappable"] and before["is_unmappable"] is False:
        return "a row of its memory could not be remapped"
    if now["uncorrected"] is not None and before["uncorrected"] is not None:
        errors = now["uncorrected"] - before["uncorrected"]
        if errors > 0:
            return f"its memory had {errors} errors that can't be corrected"
    return None if xid is None else f"its driver reported XID {xid}"


def log(event: str, **fields: Any) -> None:
    OUTPUT.write(json.dumps({"ts": round(time.time(), 6), "level": "info", "event": event, "role": "runner", **fields}))


def wipe(directory: pathlib.Path) -> None:
    """Remove what an earlier container of the pod has left, as far as that is allowed: its room stays used for it."""
    for path in directory.iterdir():
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        except OSError as error:
            log("file of an earlier container kept", reason=str(error))


def main() -> int:
    os.umask(0o007)  # files are shared with the agent through the pod's group
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, MANY_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))  # its children have it too
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans come to it even if it is not the first process
    os.set_blocking(OUTPUT.descriptor, False)
    for wiped in filter(None, os.environ.get(WIPED, "").split(":")):
        wipe(pathlib.Path(wiped))
    runner = Runner(os.environ.get(SOCKET, DEFAULT_SOCKET), float(os.environ.get(GRACE, DEFAULT_GRACE_S)))
    log("runner started", runner=runner.id, files=files)
    code = runner.run()
    OUTPUT.end(LAST_WORDS_S)
    return code


if __name__ == "__main__":
    sys.exit(main())
