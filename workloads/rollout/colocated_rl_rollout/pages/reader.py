"""Serve the pages of a job that has no pods, over its store: `python -m colocated_rl_rollout.pages.reader`.

`kubectl crlj reader` makes the pod. It mounts the job's claim read-only and reads a copy of the database, so it
changes nothing; it listens on its loopback alone, and runs until it is asked to end.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from aiohttp import web

from colocated_rl_api import logs, names
from colocated_rl_api.facts import RolloutFacts
from colocated_rl_api.listening import listen
from colocated_rl_api.member_wire import Hello, JobFile
from colocated_rl_member.other_sites import refuse_other_sites
from colocated_rl_member.settings import SettingsError, read_job, required
from colocated_rl_rollout.pages.exports import SampleExports
from colocated_rl_rollout.pages.followers import Followers
from colocated_rl_rollout.pages.interface import interface
from colocated_rl_rollout.pages.pages import pages
from colocated_rl_rollout.pages.words import in_words
from colocated_rl_rollout.rules.chat import Chat, ModelUnusable
from colocated_rl_rollout.store.database import StoreFailed
from colocated_rl_rollout.store.reader import StoreCopy, StoreReader

LOG = logging.getLogger(__name__)


def application(store: StoreReader, hello: Hello, model: Path) -> web.Application:
    """Return the pages. model: with the tokenizer, for words. Raises ModelUnusable."""
    words = partial(in_words, decoder=Chat(model))
    followers = Followers(store, words)
    followers.end()  # no sample ends any more

    def facts() -> RolloutFacts:
        return store.facts(stopped=True)

    async def show_state(_: web.Request) -> web.Response:
        shown = {"hello": hello, "facts": facts()}
        return web.json_response(
            {"target": None} | {name: each.model_dump(mode="json", by_alias=True) for name, each in shown.items()}
        )

    made = web.Application(middlewares=[refuse_other_sites])
    document = partial(interface, batches=False, gateway=False)
    made.add_routes(pages(store, facts, list, words, followers, SampleExports(store, model), document))
    made.add_routes([web.get("/v1/state", show_state)])
    return made


async def serve(job: JobFile, environment: Mapping[str, str], given: argparse.Namespace, copy: Path) -> None:
    """Serve until SIGTERM. copy: empty directory, for the database.

    environment: names this pod. Raises SettingsError, StoreFailed, ModelUnusable and OSError.
    """
    store = await asyncio.to_thread(StoreCopy, given.store, copy, job_uid=job.uid)
    hello = Hello(
        pod=required(environment, names.ENV_POD_NAME),
        pod_uid=names.PodUid(required(environment, names.ENV_POD_UID)),
        job_uid=job.uid,
        role=names.ROLE_ROLLOUT,
        incarnation=uuid.uuid4().hex,
        highest_epoch=store.epoch,
    )
    ending = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ending.set)
    runner = web.AppRunner(application(store, hello, given.models / job.spec.model.path), access_log=None)
    await runner.setup()
    try:
        site = web.SockSite(runner, listen("127.0.0.1", given.pages_port))
        await site.start()
        logs.log(LOG, "reader ready", address=site.name, step=store.trained_step)
        await ending.wait()
    finally:
        await runner.cleanup()


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m colocated_rl_rollout.pages.reader", description="Serves samples of a job that has no pods."
    )
    parser.add_argument("--job-file", type=Path, default=Path(names.JOB_FILE))
    parser.add_argument("--store", type=Path, default=Path(names.STATE_DIR), help="directory of the store, read-only")
    parser.add_argument("--models", type=Path, default=Path(names.MODEL_DIR), help="what spec.model.path is in")
    parser.add_argument("--pages-port", type=int, default=names.PAGES_PORT)
    given = parser.parse_args(arguments)
    logs.configure(role="reader")
    try:
        job = read_job(given.job_file)
        logs.configure(job=job.name, job_uid=job.uid)
        with tempfile.TemporaryDirectory() as copy:
            asyncio.run(serve(job, environment, given, Path(copy)))
    except (SettingsError, StoreFailed, ModelUnusable, OSError) as error:
        logs.log(LOG, "reader failed", logging.ERROR, reason=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
