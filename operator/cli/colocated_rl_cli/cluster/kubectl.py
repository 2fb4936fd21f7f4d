"""The login: kubectl's own.

`kubectl proxy` on a Unix socket in a private directory speaks to the API server as whoever calls this program. So each
context, certificate, exec plugin, proxy and OIDC token that works for kubectl works here, and nothing of a credential
passes through this process. The socket and kubectl end with it, by a kill -9 too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import tempfile
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from colocated_rl_cli.base.errors import NotReached

START_DEADLINE_S = 20.0
ANSWER_DEADLINE_S = 20.0
END_DEADLINE_S = 5.0
MAX_WORDS = 2000

# Runs a program for as long as standard input is open: the other end is ours, and closes with us however we end.
_TIED = '"$@" </dev/null & trap "kill $!" EXIT; exec >&- 2>&-; read -r _'


@dataclass(frozen=True)
class Login:
    """Which cluster, as whom: words for kubectl. What is None is as in the kubeconfig."""

    kubeconfig: str | None = None
    context: str | None = None
    program: tuple[str, ...] = ("kubectl",)
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    @classmethod
    def of(cls, environment: Mapping[str, str], *, kubeconfig: str | None, context: str | None) -> Login:
        """KUBECTL names another kubectl, perhaps with words after it."""
        program = tuple(shlex.split(environment.get("KUBECTL", ""))) or ("kubectl",)
        return cls(kubeconfig, context, program, environment)

    def command(self, *words: str) -> list[str]:
        """Raises NotReached."""
        program = shutil.which(self.program[0], path=self.environment.get("PATH"))
        if program is None:
            raise NotReached(
                f"there is no {self.program[0]} on PATH, which logs in to the cluster: install it, or name one in "
                "KUBECTL"
            )
        return [program, *self.program[1:], *words, *self._flags()]

    def _flags(self) -> list[str]:
        flags = {"--kubeconfig": self.kubeconfig, "--context": self.context}
        return [f"{flag}={value}" for flag, value in flags.items() if value is not None]

    async def namespace(self) -> str:
        """Of the context; `default` where it names none. Raises NotReached."""
        words = ("config", "view", "--minify", "--output=jsonpath={..namespace}")
        process = await asyncio.create_subprocess_exec(
            *self.command(*words), stdin=DEVNULL, stdout=PIPE, stderr=PIPE, env=self.environment
        )
        try:
            async with asyncio.timeout(ANSWER_DEADLINE_S):
                said, complaint = await process.communicate()
        except TimeoutError as error:
            process.kill()
            raise NotReached(f"kubectl config view gave no answer in {ANSWER_DEADLINE_S:.0f} s") from error
        if process.returncode != 0:
            if self.context is not None:
                raise NotReached(
                    f"kubectl has no such context: {_words(complaint)}; kubectl config get-contexts lists them"
                )
            raise NotReached(
                f"kubectl knows no cluster to ask ({_words(complaint)}): name its file in KUBECONFIG or with "
                "--kubeconfig, or choose one: kubectl config use-context NAME"
            )
        return said.decode().strip() or "default"


@asynccontextmanager
async def proxied(login: Login) -> AsyncIterator[Path]:
    """A socket at which the API server answers plain HTTP, while the block runs. Raises NotReached."""
    directory = Path(tempfile.mkdtemp(prefix="crlj-"))  # mode 0700, and short: a socket's path holds 107 bytes
    try:
        socket = directory / "api"
        command = login.command("proxy", f"--unix-socket={socket}")
        complaints = directory / "complaints"
        async with _tied(command, login.environment, complaints) as process:
            await _until_it_serves(process, complaints)
            yield socket
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@asynccontextmanager
async def _tied(
    command: Sequence[str], environment: Mapping[str, str], complaints: Path
) -> AsyncIterator[asyncio.subprocess.Process]:
    """complaints: file for what it says to standard error; a pipe that nobody reads would stop it one day."""
    with complaints.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            *("/bin/sh", "-c", _TIED, "sh", *command),
            stdin=PIPE,
            stdout=PIPE,
            stderr=file,
            env=environment,
            start_new_session=True,  # Ctrl-C is for this process alone
        )
    assert process.stdin is not None
    try:
        yield process
    finally:
        process.stdin.close()
        try:
            async with asyncio.timeout(END_DEADLINE_S):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            await process.wait()


async def _until_it_serves(process: asyncio.subprocess.Process, complaints: Path) -> None:
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_DEADLINE_S):
            if b"Starting to serve" in await process.stdout.readline():
                return
    except TimeoutError as error:
        raise NotReached(f"kubectl proxy did not start within {START_DEADLINE_S:.0f} s") from error
    raise NotReached(f"kubectl proxy did not start: {_said(complaints) or 'it said nothing'}")


def _said(file: Path) -> str:
    return _words(file.read_bytes())


def _words(text: bytes) -> str:
    return text.decode(errors="replace").strip()[-MAX_WORDS:]
