"""One run of the set-up: its clock, its voice, and the programs it started."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

STOP_S = 60.0  # how long programs may take to clean up and end before they are killed
LAST_LINES = 15  # of a failed program's output


class SetupError(Exception):
    """Something could not be made. The message says what and why; nothing half-made counts as made."""


class Interrupted(Exception):
    """The run is being stopped: whoever gets this ends without a word."""


class SetupSession:
    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._began = time.monotonic()
        self._voice = threading.Lock()
        self._held_back: list[str] | None = None
        self._programs: dict[subprocess.Popen[bytes], signal.Signals] = {}  # and what asks each to end
        self._programs_lock = threading.Lock()
        self._is_stopped = False

    def say(self, text: str) -> None:
        line = f"[{time.monotonic() - self._began:4.0f} s] {text}\n"
        with self._voice:
            if self._held_back is None:
                sys.stdout.write(line)
                sys.stdout.flush()
            else:
                self._held_back.append(line)

    @contextmanager
    def silence(self) -> Iterator[None]:
        """Hold back what is said meanwhile, so that the output of another program stays whole."""
        with self._voice:
            self._held_back = []
        try:
            yield
        finally:
            with self._voice:
                sys.stdout.write("".join(self._held_back))
                sys.stdout.flush()
                self._held_back = None

    def run(
        self, log: str, command: Sequence[str | Path], *, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        """Run a program to its end, its output in `<log>.txt`. Raises SetupError with the last lines if it fails."""
        self._logs.mkdir(parents=True, exist_ok=True)
        path = self._logs / f"{log}.txt"
        with path.open("ab") as output:
            output.write(f"$ {' '.join(map(str, command))}\n".encode())
            output.flush()
            code = self._run_to_its_end(command, signal.SIGTERM, cwd=cwd, env=env, output=output.fileno())
        if code != 0:
            last = path.read_text(errors="replace").splitlines()[-LAST_LINES:]
            raise SetupError("\n    ".join([f"`{command[0]}` ended with {code} (all of its output: {path})", *last]))

    def show(self, command: Sequence[str], *, cwd: Path) -> int:
        """Run a program to its end on our own terminal; its exit code. It is stopped like by Ctrl-C, and cleans up."""
        with self.silence():
            return self._run_to_its_end(command, signal.SIGINT, cwd=cwd, env=None, output=None)

    def stop(self) -> None:
        """End every program that is still running, and let none start."""
        with self._programs_lock:
            self._is_stopped = True
            programs = dict(self._programs)
        for program, request in programs.items():
            _signal_group(program, request)
        deadline = time.monotonic() + STOP_S
        for program in programs:
            try:
                program.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _signal_group(program, signal.SIGKILL)

    def _run_to_its_end(
        self,
        command: Sequence[str | Path],
        request: signal.Signals,
        *,
        cwd: Path | None,
        env: Mapping[str, str] | None,
        output: int | None,
    ) -> int:
        with self._programs_lock:
            if self._is_stopped:
                raise Interrupted
            program = subprocess.Popen(
                [str(word) for word in command],
                cwd=cwd,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if output is not None else None,
                process_group=0,  # so that `stop` reaches what it starts in turn
            )
            self._programs[program] = request
        code = program.wait()  # interrupted here, the program stays known to `stop`
        with self._programs_lock:
            del self._programs[program]
        if self._is_stopped:
            raise Interrupted
        return code


def _signal_group(program: subprocess.Popen[bytes], number: signal.Signals) -> None:
    try:
        os.killpg(program.pid, number)
    except ProcessLookupError:
        return  # it ended by itself
