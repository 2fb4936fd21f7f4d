"""Engines of tests and benchmarks as processes: started as an agent starts them, ended whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from colocated_rl_agent.drivers.sglang import SGLang, engine_command, engine_config
from colocated_rl_api.rungs import WeightVersion
from colocated_rl_trainer.conformance.ranks import free_port
from setup.layout import CHECKOUT

ADMIN_KEY = "admin-key-of-a-test"
START_S = 300.0
CPU_FLAGS = (
    "--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native", "--disable-overlap-schedule",
    "--log-level", "warning",
)  # fmt: skip


@dataclass(frozen=True)
class EngineProcess:
    url: str
    process: subprocess.Popen[bytes]
    output: Path

    def wait_until_up(self) -> None:
        """Raises RuntimeError with the engine's last words."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/ping", timeout=5) as answer:
                    if answer.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        raise RuntimeError(f"the engine did not start:\n{self.output.read_text()[-4000:]}")


@asynccontextmanager
async def paused_engine(url: str, export: Path, version: WeightVersion, *, call_s: float) -> AsyncIterator[SGLang]:
    """Give an engine's driver while it is paused and holds this export."""
    async with aiohttp.ClientSession() as session:
        client = SGLang(session, url=url, admin_key=ADMIN_KEY, call_s=call_s)
        await client.pause()
        await client.update(export, version)
        yield client
        await client.continue_()


@contextmanager
def engine_process(
    model: Path,
    *,
    version: WeightVersion,
    root: Path,
    flags: Sequence[str] = (),
    binaries: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> Iterator[EngineProcess]:
    """One on the CPU; perhaps not up yet. binaries: whose python3 it is, of the GPU image unless told."""
    port = free_port()
    config, output = root / "engine.yaml", root / "output"
    config.write_text(engine_config(ADMIN_KEY))
    command = engine_command(
        model=model,
        version=version,
        port=port,
        config=config,
        gpus=0,
        saved_tags=(),
        extra=(*CPU_FLAGS, *flags),
    )
    environment = {
        "PATH": f"{binaries or CHECKOUT.environment('gpu') / 'bin'}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HOME": str(root),
        **{name: value for name, value in command.env.items() if value is not None},
        **(variables or {}),
    }
    with output.open("wb") as stream:
        process = subprocess.Popen(command.argv, env=environment, stdout=stream, stderr=stream, start_new_session=True)
    try:
        yield EngineProcess(f"http://127.0.0.1:{port}", process, output)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)
