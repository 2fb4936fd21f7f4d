"""kubectl as far as the command line uses it: `proxy` to a fake API server of this process, a context's namespace."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aiohttp import web

from fakes.cluster_api import ClusterApi

START_DEADLINE_S = 60.0

# Joins the socket that it is told to the one of the fake, byte by byte, as long as it runs.
_PROGRAM = """\
import json, os, pathlib, socket, sys, threading
folder, words = pathlib.Path(sys.argv[1]), sys.argv[2:]
with (folder / "calls").open("a") as calls:
    calls.write(json.dumps(words) + "\\n")
if words[0] == "config":
    print("default")
    sys.exit()
(folder / "running").write_text(str(os.getpid()))
path = next(word for word in words if word.startswith("--unix-socket=")).partition("=")[2]
def copy(source, sink):
    while data := source.recv(1 << 16):
        sink.sendall(data)
    try:
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        pass
listening = socket.socket(socket.AF_UNIX)
listening.bind(path)
listening.listen(64)
print(f"Starting to serve on {path}", flush=True)
while True:
    caller, _ = listening.accept()
    server = socket.socket(socket.AF_UNIX)
    server.connect(str(folder / "api"))
    for ends in ((caller, server), (server, caller)):
        threading.Thread(target=copy, args=ends, daemon=True).start()
"""


class Played:
    """Answers as kubectl does. environment: in which the command line finds this kubectl."""

    def __init__(
        self, folder: Path, environment: dict[str, str], loop: asyncio.AbstractEventLoop, api: ClusterApi
    ) -> None:
        self.environment = environment
        self._folder = folder
        self._loop = loop
        self._api = api

    def calls(self) -> list[list[str]]:
        """The words of each start."""
        return [json.loads(line) for line in (self._folder / "calls").read_text().splitlines()]

    def is_running(self) -> bool:
        """The newest `proxy`."""
        pid = (self._folder / "running").read_text()
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except (FileNotFoundError, ProcessLookupError):
            return False

    def change(self) -> None:
        """Something that the API server holds has changed."""
        self._loop.call_soon_threadsafe(self._api.changed.set)

    def cut_links(self) -> None:
        """Port-forwards that are open end, in the middle of what they carry."""
        for link in self._api.links:
            self._loop.call_soon_threadsafe(link.cut)
        self._api.links.clear()

    def end(self) -> None:
        """The API server goes away."""
        (self._folder / "api").unlink()


@contextmanager
def play_kubectl(api: ClusterApi, folder: Path) -> Iterator[Played]:
    program = folder / "kubectl.py"
    program.write_text(_PROGRAM)
    loop = asyncio.new_event_loop()
    serving = threading.Event()

    async def serve() -> web.AppRunner:
        runner = web.AppRunner(api.application(), shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.UnixSite(runner, str(folder / "api")).start()
        return runner

    def work() -> None:
        runner = loop.run_until_complete(serve())
        loop.call_soon(serving.set)  # not before it runs forever: a stop before that would end nothing
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=work, name="fake API server", daemon=True)
    thread.start()
    assert serving.wait(START_DEADLINE_S)
    words = [sys.executable, "-S", "-I", str(program), str(folder)]
    environment = os.environ | {"KUBECTL": shlex.join(words)}
    for name in ("KUBECONFIG", "COLUMNS", "LINES"):
        environment.pop(name, None)
    try:
        yield Played(folder, environment, loop, api)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(START_DEADLINE_S)
        assert not thread.is_alive()
