"""`python -m colocated_rl_agent` runs the agent of a GPU pod. Its exit code is 0 after SIGTERM, else 1.

`python -m colocated_rl_agent install-runner DIRECTORY` copies the runner to where the GPU container starts it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import sys
from pathlib import Path

import aiohttp
import uvloop
from prometheus_client import REGISTRY

from colocated_rl_agent.agent import Agent
from colocated_rl_agent.drivers.sglang import IDLE_CONNECTION_S
from colocated_rl_agent.runner import runner
from colocated_rl_agent.settings import AgentSettings, read_settings
from colocated_rl_api import descriptors, garbage, logs, names
from colocated_rl_member.settings import SettingsError

LOG = logging.getLogger(__name__)

UMASK = 0o007  # files are shared with the GPU container through the pod's group


async def serve(settings: AgentSettings) -> None:
    """Run one agent until it ends. Raises the errors of its parts, in a group or alone."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_S)
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=None), trust_env=False
    ) as session:
        agent = Agent(settings, session, REGISTRY)
        garbage.look_seldom()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, agent.end)
        await agent.run()


def install_runner(directory: Path) -> None:
    """Copy the runner into a directory that the GPU container mounts; it replaces an older one at once."""
    directory.mkdir(parents=True, exist_ok=True)
    draft = directory / ".runner.draft"
    shutil.copyfile(runner.__file__, draft)
    draft.chmod(0o755)
    draft.replace(directory / "runner")


def main() -> int:
    logs.configure(role=names.ROLE_GPU)
    os.umask(UMASK)
    try:
        match sys.argv[1:]:
            case ["install-runner", directory]:
                install_runner(Path(directory))
                return 0
            case arguments:
                descriptors.raise_limit()
                settings = read_settings(arguments, os.environ)
        logs.configure(role=settings.role, job=settings.job.name, job_uid=settings.job.uid, pod=settings.pod)
        uvloop.run(serve(settings))
    except (SettingsError, ValueError, OSError) as error:
        logs.log(LOG, "agent failed", logging.ERROR, reason=str(error))
        return 1
    except ExceptionGroup:  # a part died: the next start finds engine and trainers through runner and journal
        LOG.exception("agent failed")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
