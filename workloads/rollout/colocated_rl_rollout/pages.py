"""HTTP routes of the rollout controller: batches for the trainers' agents, and pages for people.

The gateway's are on both ports: behind TLS and the data token for the job's other pods, and on the pod's loopback for
what runs beside the controller, and for people who forward that port.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from aiohttp import web

from colocated_rl_api.batch import DIGEST_HEADER
from colocated_rl_api.member_wire import RolloutFacts
from colocated_rl_member.data import data_application
from colocated_rl_member.tls import MemberTls
from colocated_rl_rollout.batches import shard_path
from colocated_rl_rollout.samples import SampleState
from colocated_rl_rollout.store import Store

MAX_REQUEST_BYTES = 64 * 1024
SAMPLES_AT_MOST = 1000


def data_routes(store: Store, tls: MemberTls, gateway: Iterable[web.AbstractRouteDef]) -> web.Application:
    """The data port: `GET /v1/batches/STEP?shard=RANK`, any number of times, always the same bytes; and the gateway."""

    async def serve_shard(request: web.Request) -> web.StreamResponse:
        step, shard = int(request.match_info["step"]), _number(request, "shard")
        record = store.batch(step)
        if record is None:
            newest = store.next_step - 1
            raise _problem(404, f"batch {step} is not kept: the newest is {newest}, those in a checkpoint are removed")
        if shard >= len(record.sha256):
            raise _problem(400, f"batch {step} has {len(record.sha256)} shards, the first is 0; there is no {shard}")
        await store.flushed()  # nobody trains on what a kill could still undo
        path = shard_path(store.batch_directory, step, shard)
        headers = {DIGEST_HEADER: record.sha256[shard], "Content-Type": "application/octet-stream"}
        return web.FileResponse(path, headers=headers)

    application = data_application(tls, max_request_bytes=MAX_REQUEST_BYTES)
    application.add_routes([web.get(r"/v1/batches/{step:\d{1,9}}", serve_shard), *gateway])
    return application


def pages(store: Store, facts: Callable[[], RolloutFacts], text: Callable[[list[int]], str]) -> list[web.RouteDef]:
    """For people, on the pod's loopback. text: what tokens say."""

    async def show_progress(_: web.Request) -> web.Response:
        ended = [
            {"state": state, "reason": reason, "samples": count}
            for (state, reason), count in sorted(store.reasons.items())
        ]
        sealed = store.sealed.model_dump(mode="json", by_alias=True) if store.sealed else None
        return web.json_response(
            {"facts": facts().model_dump(mode="json", by_alias=True), "sealed": sealed, "endedWithoutTraining": ended}
        )

    async def show_samples(request: web.Request) -> web.Response:
        asked = request.query.get("state")
        if asked is not None and asked not in set(SampleState):
            raise _problem(400, f"state is one of {', '.join(SampleState)}")
        limit = min(_number(request, "limit", 100), SAMPLES_AT_MOST)
        state, words = SampleState(asked) if asked else None, text if _number(request, "text", 0) else None
        rows = await asyncio.to_thread(store.recent, state, limit=limit, text=words)
        return web.json_response({"samples": rows})

    return [web.get("/v1/progress", show_progress), web.get("/v1/samples", show_samples)]


def _number(request: web.Request, name: str, default: int | None = None) -> int:
    text = request.query.get(name, None if default is None else str(default))
    if text is None or not (text.isascii() and text.isdigit() and len(text) < 10):
        raise _problem(400, f"?{name}=N is needed, a number from 0 up")
    return int(text)


def _problem(status: int, message: str) -> web.HTTPException:
    kind = web.HTTPNotFound if status == 404 else web.HTTPBadRequest
    return kind(text=message + "\n")
