"""Log in through kubectl.

`kubectl proxy` on a Unix socket in a private directory talks to the API server as the user of this program. So each
context, certificate, exec plugin, proxy and OIDC token that works for kubectl works here, and no credential passes
through this process. The socket and kubectl end with this process, also after a kill -9.
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

from colocated_rl_cli.base.errors import NotReached, UsageError

START_DEADLINE_S = 20.0
ANSWER_DEADLINE_S = 20.0
END_DEADLINE_S = 5.0
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # of a pod, where kubectl looks for it
MAX_OUTPUT_CHARACTERS = 2000

# Runs a program for as long as standard input is open. This process holds the other end, which closes however it ends.
_TIED = '"$@" </dev/null & trap "kill $!" EXIT; exec >&- 2>&-; read -r _'


@dataclass(frozen=True)
class Login:
    """A login names the cluster and the user, in kubectl's own flags; None means as in the kubeconfig.

    service_account: what a pod has of its ServiceAccount, with which kubectl logs in where there is no kubeconfig.
    """

    kubeconfig: str | None = None
    context: str | None = None
    program: tuple[str, ...] = ("kubectl",)
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    service_account: Path = SERVICE_ACCOUNT

    @classmethod
    def of(cls, environment: Mapping[str, str], *, kubeconfig: str | None, context: str | None) -> Login:
        """Build a login from the environment, in which KUBECTL may name another kubectl, with arguments.

        Raises UsageError if that is no command line.
        """
        try:
            program = tuple(shlex.split(environment.get("KUBECTL", ""))) or ("kubectl",)
        except ValueError as error:
            raise UsageError(f"KUBECTL is no command line: {error}") from error
        return cls(kubeconfig, context, program, environment)

    def command(self, *words: str) -> list[str]:
        """Return a kubectl command line with the login's flags. Raises NotReached without kubectl on PATH."""
        program = shutil.which(self.program[0], path=self.environment.get("PATH"))
        if program is None:
            raise NotReached(
                f"there is no {self.program[0]} on PATH, which logs in to the cluster: install it, or name one in "
                "KUBECTL"
            )
        return [program, *self.program[1:], *words, *self.flags()]

    def flags(self) -> list[str]:
        """Return kubectl's own flags for the cluster and the user."""
        flags = {"--kubeconfig": self.kubeconfig, "--context": self.context}
        return [f"{flag}={value}" for flag, value in flags.items() if value is not None]

    async def namespace(self) -> str:
        """Return the context's namespace; if it names none, as kubectl does, that of this pod or `default`.

        Raises NotReached.
        """
        words = ("config", "view", "--minify", "--output=jsonpath={..namespace}")
        process = await asyncio.create_subprocess_exec(
            *self.command(*words), stdin=DEVNULL, stdout=PIPE, stderr=PIPE, env=self.environment
        )
        try:
            async with asyncio.timeout(ANSWER_DEADLINE_S):
                output, error_output = await process.communicate()
        except TimeoutError as error:
            process.kill()
            raise NotReached(f"kubectl config view gave no answer in {ANSWER_DEADLINE_S:.0f} s") from error
        of_pod = self._namespace_of_pod()
        if process.returncode != 0 and (of_pod is None or self.kubeconfig or self.context):
            if self.context is not None:
                raise NotReached(
                    f"kubectl has no such context: {_decoded(error_output)}; kubectl config get-contexts lists them"
                )
            raise NotReached(
                f"kubectl knows no cluster to ask ({_decoded(error_output)}): name its file in KUBECONFIG or with "
                "--kubeconfig, or choose one: kubectl config use-context NAME"
            )
        return output.decode().strip() or of_pod or "default"

    def _namespace_of_pod(self) -> str | None:
        """Return the namespace that kubectl uses in a pod by itself; None outside of one, or without a token."""
        token, namespace = self.service_account / "token", self.service_account / "namespace"
        if not (self.environment.get("KUBERNETES_SERVICE_HOST") and token.is_file()):
            return None
        named = self.environment.get("POD_NAMESPACE")
        return named or (namespace.read_text().strip() if namespace.is_file() else None) or "default"


@asynccontextmanager
async def proxied(login: Login) -> AsyncIterator[Path]:
    """Yield a socket at which the API server answers plain HTTP while the block runs. Raises NotReached."""
    directory = Path(tempfile.mkdtemp(prefix="crlj-"))  # mode 0700, and short: a socket's path holds 107 bytes
    try:
        socket = directory / "api"
        command = login.command("proxy", f"--unix-socket={socket}")
        stderr_file = directory / "stderr"
        async with _tied(command, login.environment, stderr_file) as process:
            await _until_it_serves(process, stderr_file)
            yield socket
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@asynccontextmanager
async def _tied(
    command: Sequence[str], environment: Mapping[str, str], stderr_file: Path
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a program that ends with this process. stderr_file: takes its standard error, since a full pipe blocks it."""
    with stderr_file.open("wb") as file:
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


async def _until_it_serves(process: asyncio.subprocess.Process, stderr_file: Path) -> None:
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_DEADLINE_S):
            if b"Starting to serve" in await process.stdout.readline():
                return
    except TimeoutError as error:
        raise NotReached(f"kubectl proxy did not start within {START_DEADLINE_S:.0f} s") from error
    raise NotReached(f"kubectl proxy did not start: {_content(stderr_file) or 'it wrote nothing'}")


def _content(file: Path) -> str:
    return _decoded(file.read_bytes())


def _decoded(output: bytes) -> str:
    return output.decode(errors="replace").strip()[-MAX_OUTPUT_CHARACTERS:]
