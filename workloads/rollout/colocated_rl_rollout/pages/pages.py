"""HTTP routes of the rollout controller serve batches to the trainers' agents, and pages to people.

The gateway's routes are on both ports: behind TLS and the data token for the job's other pods, and on the pod's
loopback for processes beside the controller, and for people who forward that port.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, NotRequired, TypeVar

from aiohttp import web
from aiohttp.typedefs import Middleware
from pydantic import BaseModel, Field, ValidationError, model_validator
from typing_extensions import TypedDict  # the standard library's can't be read by pydantic before Python 3.12

from colocated_rl_api.batch import DIGEST_HEADER
from colocated_rl_api.facts import EvaluationResult, RolloutFacts
from colocated_rl_api.holders import PodHolder
from colocated_rl_member.data import data_application
from colocated_rl_member.tls import MemberTls
from colocated_rl_rollout.pages.exports import SampleExports
from colocated_rl_rollout.pages.followers import Followers
from colocated_rl_rollout.pages.watch import watch_page
from colocated_rl_rollout.pages.words import SpanShown
from colocated_rl_rollout.rules.samples import Finish, GroupId, SampleId, SampleState
from colocated_rl_rollout.store.batches import BatchRecord, shard_path
from colocated_rl_rollout.store.reader import StoreReader, Words
from colocated_rl_rollout.store.store import BatchNotDealt, Store

MAX_REQUEST_BYTES = 64 * 1024
SAMPLES_AT_MOST, SAMPLES_DEFAULT = 1000, 100
BATCHES_AT_MOST = 1000
AskedT = TypeVar("AskedT", bound=BaseModel)


class ShardAsked(BaseModel):
    """Names a batch, in a query."""

    shard: int = Field(ge=0, lt=10**9, description="rank of the trainer")
    of: int | None = Field(
        default=None, ge=1, le=2**16, description="how many ranks train; the batch is dealt anew to others than before"
    )


class SamplesAsked(BaseModel):
    """Selects samples, in a query."""

    state: SampleState | None = Field(default=None, description="of these alone")
    before: int | None = Field(default=None, ge=0, lt=2**63, description="a page further: the id of the last one seen")
    limit: int | None = Field(
        default=None,
        ge=0,
        lt=10**9,
        description=f"at most; {SAMPLES_DEFAULT} when absent, and never more than {SAMPLES_AT_MOST}. Of a file all "
        "when absent, and at most that many",
    )
    format: Literal["json", "parquet"] = Field(
        default="json", description="parquet: a file, with tokens; its columns are in docs/samples.md"
    )
    follow: bool = Field(
        default=False,
        description="lines of JSON instead, a sample each: the newest that ended, `limit` at most, then each as it "
        "ends; an empty line where none ends for a while",
    )
    after: int | None = Field(
        default=None, ge=0, lt=2**63, description="with follow, go on: `ended` of the last one seen; 0 is all there are"
    )
    text: bool = Field(
        default=False, description="with prompt and response; in JSON also which weights drew which part"
    )

    @model_validator(mode="after")
    def _fits(self) -> SamplesAsked:
        if self.follow and self.before is not None:
            raise ValueError("?before= is of pages: follow goes on with ?after=")
        if self.after is not None and not self.follow:
            raise ValueError("?after= is of ?follow=true: pages go on with ?before=")
        if self.format == "parquet" and (self.follow or self.before is not None):
            raise ValueError("?format=parquet is of samples as they are now: neither ?follow= nor ?before=")
        return self


class BatchesAsked(BaseModel):
    """Selects batches, in a query."""

    after: int = Field(
        default=0, ge=0, lt=10**9, description=f"those of later steps, {BATCHES_AT_MOST} at most: the last one seen"
    )


class SampleShown(TypedDict):
    """Shows one sample. `finish`, `reward` and `step` are null until it has them."""

    id: SampleId
    group_id: GroupId
    prompt_index: Annotated[int, Field(description="row of the data; negative of sessions and of recordings")]
    state: SampleState
    reason: Annotated[str, Field(description="of a sample that ended without training")]
    attempts: Annotated[int, Field(description="at engines, those that ended")]
    resent: Annotated[int, Field(description="tokens that engines were sent again, to prefill, after interruptions")]
    finish: Finish | None
    reward: float | None
    step: Annotated[int | None, Field(description="of the batch that holds it")]
    ended: Annotated[
        int | None, Field(description="its place among all that ended (reward in, failed or given up), from 1 on")
    ]
    unversioned: Annotated[
        int | None,
        Field(description="tokens for which an engine named no weight version of the job; null of a recording"),
    ]
    figures: Annotated[
        dict[str, float], Field(description="what came beside the reward; empty without any, and of a recording")
    ]
    prompt: NotRequired[str | None]
    response: NotRequired[str | None]
    spans: NotRequired[list[SpanShown]]


class SamplesShown(TypedDict):
    samples: Annotated[list[SampleShown], Field(description="the newest first; those in a checkpoint are only counted")]


class BatchesShown(TypedDict):
    batches: Annotated[list[BatchRecord], Field(description="the oldest first; of a long job the oldest are gone")]


class EvaluationsShown(TypedDict):
    evaluations: list[EvaluationResult]


class Ended(TypedDict):
    state: SampleState
    reason: str
    samples: int


class EngineShown(TypedDict):
    """Shows an engine as the rollout controller sees it: by its gate."""

    pod: str
    open: Annotated[bool | None, Field(description="its gate; null: it does not answer")]
    version: Annotated[str | None, Field(description="of its weights, step.lineage, while its gate is open")]
    inFlight: Annotated[int, Field(description="requests of the rollout controller")]
    holder: Annotated[PodHolder | None, Field(description="of the pod's GPUs; null: the gate does not show it")]
    why: str


class Progress(TypedDict):
    facts: RolloutFacts
    engines: Annotated[list[EngineShown], Field(description="those that the operator names, by pod")]
    sealed: Annotated[BatchRecord | None, Field(description="the newest batch")]
    endedWithoutTraining: list[Ended]


def data_routes(
    store: Store, tls: MemberTls, gateway: Iterable[web.AbstractRouteDef], around: Iterable[Middleware]
) -> web.Application:
    """Return the data port: `GET /v1/batches/STEP?shard=RANK&of=RANKS`, repeatable with equal bytes; and the gateway.

    around: middlewares between the token check and all of them.
    """

    async def serve_shard(request: web.Request) -> web.StreamResponse:
        step, asked = int(request.match_info["step"]), _asked(request, ShardAsked)
        shard = asked.shard
        try:
            record = store.batch(step) if asked.of is None else await store.dealt(step, asked.of)
        except BatchNotDealt as error:
            raise _problem(503, str(error)) from error
        if record is None:
            newest = store.next_step - 1
            raise _problem(404, f"batch {step} is not kept: the newest is {newest}, those in a checkpoint are removed")
        if shard >= len(record.sha256):
            raise _problem(400, f"batch {step} has {len(record.sha256)} shards, the first is 0; there is no {shard}")
        await store.flushed()  # nobody may train on a change that a kill could still undo
        path = shard_path(store.batch_directory, step, shard)
        headers = {DIGEST_HEADER: record.sha256[shard], "Content-Type": "application/octet-stream"}
        return web.FileResponse(path, headers=headers)

    application = data_application(tls, max_request_bytes=MAX_REQUEST_BYTES)
    application.middlewares.extend(around)
    application.add_routes([web.get(r"/v1/batches/{step:\d{1,9}}", serve_shard), *gateway])
    return application


def pages(
    store: StoreReader,
    facts: Callable[[], RolloutFacts],
    engines: Callable[[], list[EngineShown]],
    words: Words,
    followers: Followers,
    exports: SampleExports,
    interface: Callable[[], Mapping[str, Any]],
) -> list[web.RouteDef]:
    """Return the routes for people, on the pod's loopback. words: of a sample. interface: document of all routes."""

    async def show_progress(_: web.Request) -> web.Response:
        ended = [
            {"state": state, "reason": reason, "samples": count}
            for (state, reason), count in sorted(store.reasons.items())
        ]
        sealed = store.sealed.model_dump(mode="json", by_alias=True) if store.sealed else None
        return web.json_response(
            {
                "facts": facts().model_dump(mode="json", by_alias=True),
                "engines": engines(),
                "sealed": sealed,
                "endedWithoutTraining": ended,
            }
        )

    async def show_samples(request: web.Request) -> web.StreamResponse:
        asked = _asked(request, SamplesAsked)
        if asked.format == "parquet":
            return await exports.serve(request, state=asked.state, limit=asked.limit, text=asked.text)
        limit = SAMPLES_DEFAULT if asked.limit is None else min(asked.limit, SAMPLES_AT_MOST)
        if asked.follow:
            after = max(0, store.ended - limit) if asked.after is None else asked.after
            if after > store.ended:
                raise _problem(400, f"?after=: only {store.ended} samples have ended: the store is another one")
            return await followers.serve(request, after=after, state=asked.state, text=asked.text)
        rows = await followers.in_turn(
            lambda: store.recent(asked.state, before=asked.before, limit=limit, words=words if asked.text else None)
        )
        return web.json_response({"samples": rows})

    async def show_batches(request: web.Request) -> web.Response:
        after = _asked(request, BatchesAsked).after
        found = await followers.in_turn(lambda: store.records(after=after, limit=BATCHES_AT_MOST))
        return web.json_response({"batches": [each.model_dump(mode="json", by_alias=True) for each in found]})

    async def show_evaluations(_: web.Request) -> web.Response:
        found = await followers.in_turn(store.evaluations)
        return web.json_response({"evaluations": [each.model_dump(mode="json", by_alias=True) for each in found]})

    async def show_interface(_: web.Request) -> web.Response:
        return web.json_response(interface())

    return [
        web.get("/", watch_page),
        web.get("/v1/progress", show_progress),
        web.get("/v1/batches", show_batches),
        web.get("/v1/evaluations", show_evaluations),
        web.get("/v1/samples", show_samples),
        web.get("/openapi.json", show_interface),
    ]


def _asked(request: web.Request, kind: type[AskedT]) -> AskedT:
    try:
        return kind.model_validate(dict(request.query))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = f"?{first['loc'][0]}=: " if first["loc"] else ""
        raise _problem(400, where + first["msg"].removeprefix("Value error, ")) from error


def _problem(status: int, message: str) -> web.HTTPException:
    kinds = {400: web.HTTPBadRequest, 404: web.HTTPNotFound, 503: web.HTTPServiceUnavailable}
    return kinds[status](text=message + "\n")
