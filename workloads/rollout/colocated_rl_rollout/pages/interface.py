"""List every route of the rollout controller that people and clients may call, as its OpenAPI document."""

from __future__ import annotations

from functools import cache
from typing import Any

from typing_extensions import TypedDict

from colocated_rl_api import names
from colocated_rl_api.batch import DIGEST_HEADER
from colocated_rl_api.facts import RolloutFacts
from colocated_rl_api.member_wire import Hello, RolloutTarget
from colocated_rl_rollout.gateway import openai_answers as answers
from colocated_rl_rollout.gateway.gateway import SESSION_HEADER, SESSION_NAME
from colocated_rl_rollout.gateway.openai_requests import ChatBody, SessionReward, TextBody
from colocated_rl_rollout.pages.exports import PARQUET
from colocated_rl_rollout.pages.followers import BEGINS_AFTER, LINES
from colocated_rl_rollout.pages.openapi import (
    EVENTS,
    HTML,
    JSON,
    SCHEMAS,
    Operation,
    Route,
    document,
)
from colocated_rl_rollout.pages.pages import (
    BatchesAsked,
    BatchesShown,
    EvaluationsShown,
    Progress,
    SamplesAsked,
    SampleShown,
    SamplesShown,
    ShardAsked,
)

PAGES = "Pages"
BATCHES = "Batches"
GATEWAY = "Gateway"
LOOPBACK = {
    "url": f"http://127.0.0.1:{names.PAGES_PORT}",
    "description": "of the pod: `kubectl port-forward` leads there",
}
SERVER_NAME = names.member_server_name(names.JobUid("JOB_UID"))
DATA_PORT = {
    "url": f"https://{{pod}}:{names.DATA_PORT}",
    "description": f"for other pods of the job; its certificate names {SERVER_NAME}",
    "variables": {"pod": {"default": "127.0.0.1", "description": "address of the rollout controller's pod"}},
}
TOKEN_SCHEME = "dataToken"
ON_LOOPBACK = {"servers": [LOOPBACK]}
ON_DATA_PORT = {"servers": [DATA_PORT], "security": [{TOKEN_SCHEME: []}]}
ON_BOTH = {"servers": [LOOPBACK, DATA_PORT], "security": [{}, {TOKEN_SCHEME: []}]}
NO_TOKEN = {"401": ("on the data port, without its token", answers.ErrorAnswer)}
REFUSED = {**NO_TOKEN, "default": ("refused, or ended; docs/gateway.md lists the cases", answers.ErrorAnswer)}
SESSION = {"schema": {"type": "string", "pattern": f"^{SESSION_NAME.pattern}$"}, "description": "a session's name"}
IN_PATH = {"name": "session", "in": "path", "required": True, **SESSION}
IN_HEADER = {"name": SESSION_HEADER, "in": "header", **SESSION}
MODEL = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
STEP = {"name": "step", "in": "path", "required": True, "schema": {"type": "integer", "minimum": 0}}


class State(TypedDict):
    """The state shows who this member is, what the operator last asked of it, and what it reports."""

    hello: Hello
    target: RolloutTarget | None
    facts: RolloutFacts


def _page(summary: str, answer: Any, **more: Any) -> Operation:
    return Operation(tag=PAGES, summary=summary, answers={JSON: answer}, rest=ON_LOOPBACK, **more)


def _asked_of_gateway(summary: str, answer: Any, event: Any = None, **more: Any) -> Operation:
    answers = {JSON: answer} | ({EVENTS: event} if event else {})
    return Operation(tag=GATEWAY, summary=summary, answers=answers, refusals=REFUSED, rest=ON_BOTH, **more)


def _turns(root: str, session: dict[str, Any]) -> dict[Route, Operation]:
    """Return routes that also stand below a session, and serve its turns there."""
    chat = (answers.ChatCompletion, answers.ChatCompletionChunk)
    text = (answers.TextCompletion, answers.TextCompletionChunk)
    above = (session,) if session is IN_PATH else ()
    return {
        Route("POST", f"{root}/chat/completions"): _asked_of_gateway(
            "Chat", *chat, body=ChatBody, parameters=(session,)
        ),
        Route("POST", f"{root}/completions"): _asked_of_gateway(
            "Complete a text, or token ids", *text, body=TextBody, parameters=(session,)
        ),
        Route("GET", f"{root}/models"): _asked_of_gateway("The job's model", answers.Models, parameters=above),
        Route("GET", f"{root}/models/{{model}}"): _asked_of_gateway(
            "The job's model", answers.ModelCard, parameters=(*above, MODEL)
        ),
    }


OPERATIONS: dict[Route, Operation] = {
    Route("GET", "/"): Operation(
        tag=PAGES,
        summary="The job to watch in a browser, which reads the other pages",
        answers={HTML: {"type": "string"}},
        rest=ON_LOOPBACK,
    ),
    Route("GET", "/v1/state"): _page("Target and facts of the rollout controller", State),
    Route("GET", "/v1/progress"): _page("How far things are", Progress),
    Route("GET", "/v1/batches"): _page(
        "Records of sealed batches, by step",
        BatchesShown,
        query=BatchesAsked,
        refusals={"400": ("a parameter can't be", None)},
    ),
    Route("GET", "/v1/evaluations"): _page("All evaluations, the newest last", EvaluationsShown),
    Route("GET", "/v1/samples"): Operation(
        tag=PAGES,
        summary="The newest samples; with follow each as it ends, a line of JSON each; or all, as a Parquet file",
        answers={
            JSON: SamplesShown,
            LINES: {"$ref": SCHEMAS.format(model=SampleShown.__name__)},
            PARQUET: {"type": "string", "format": "binary"},
        },
        headers={
            BEGINS_AFTER: {"schema": {"type": "integer"}, "description": "with follow: the place before the first"}
        },
        query=SamplesAsked,
        refusals={
            "400": ("a parameter can't be", None),
            "429": ("too many follow, or a file is being written", None),
            "500": ("no file could be written", None),
        },
        rest=ON_LOOPBACK,
    ),
    Route("GET", "/openapi.json"): _page("This document", {"type": "object"}),
    Route("GET", "/v1/batches/{step}"): Operation(
        tag=BATCHES,
        summary="A shard of a sealed batch: safetensors, as in colocated_rl_api.batch; the same bytes each time",
        answers={"application/octet-stream": {"type": "string", "format": "binary"}},
        headers={DIGEST_HEADER: {"schema": {"type": "string"}, "description": "SHA-256 of the shard"}},
        refusals={
            "400": ("there is no such shard", None),
            **NO_TOKEN,
            "404": ("no such batch is kept", None),
            "503": ("it can't be dealt to so many ranks now", None),
        },
        query=ShardAsked,
        parameters=(STEP,),
        rest=ON_DATA_PORT,
    ),
    **_turns("/v1", IN_HEADER),
    **_turns("/v1/sessions/{session}", IN_PATH),
    Route("GET", "/v1/sessions"): _asked_of_gateway("Sessions that are held", answers.HeldSessions),
    Route("GET", "/v1/sessions/{session}"): _asked_of_gateway(
        "A session and its trajectory", answers.ShownSession, parameters=(IN_PATH,)
    ),
    Route("DELETE", "/v1/sessions/{session}"): _asked_of_gateway(
        "Give a session up", answers.DeletedSession, parameters=(IN_PATH,)
    ),
    Route("POST", "/v1/sessions/{session}/reward"): _asked_of_gateway(
        "Say what a session is worth, which ends it", answers.RewardedSession, body=SessionReward, parameters=(IN_PATH,)
    ),
}


@cache
def interface(*, batches: bool = True, gateway: bool = True) -> dict[str, Any]:
    """Return the document. gateway: include its routes; a job that only trains has none. batches: those of trainers."""
    left_out = {*([] if batches else [BATCHES]), *([] if gateway else [GATEWAY])}
    return document(
        {route: operation for route, operation in OPERATIONS.items() if operation.tag not in left_out},
        info={
            "title": "Colocated RL: rollout controller",
            "version": "v1",
            "description": "One job's rollout controller: pages for people, batches for trainers, OpenAI's API for "
            "agents and any other client.",
        },
        components={"securitySchemes": {TOKEN_SCHEME: {"type": "http", "scheme": "bearer"}}},
    )
