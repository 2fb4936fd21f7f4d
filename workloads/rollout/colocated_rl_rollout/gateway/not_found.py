"""A request for an unknown route gets an error in the shape of OpenAI's API that names the route to use instead.

A client that was written for the whole of that API, or that has another `base_url`, requests routes that are not here;
its library reads a message only from an error of that shape.
"""

from __future__ import annotations

from collections.abc import Iterable

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from colocated_rl_rollout.gateway.openai_requests import RequestRefused
from colocated_rl_rollout.metrics import RolloutMetrics

ROUTES = ("POST /v1/chat/completions", "POST /v1/completions", "GET /v1/models")
CONVERSATIONS = ("responses", "conversations", "assistants", "threads", "messages")
OTHERS = (
    "audio", "batches", "containers", "embeddings", "evals", "files", "fine_tuning", "images", "moderations",
    "realtime", "uploads", "vector_stores", "videos",
)  # fmt: skip
LONGEST = 200  # characters of a path that the message repeats


def no_such_route(method: str, path: str, *, allowed: Iterable[str], origin: str) -> RequestRefused:
    """Return the error for an unknown route. allowed: methods of the path, if any. origin: where the client is."""
    asked = f"{method} {path}"[:LONGEST]
    if methods := [each for each in sorted(allowed) if each != "HEAD"]:
        message = f"there is no {asked}: ask {' or '.join(methods)}"
        return RequestRefused(405, message, code="method_not_supported")
    of = set(path.split("/"))
    if any(path.endswith(route.partition("/v1")[2]) for route in ROUTES):
        instead = f"set base_url to {origin}/v1"
    elif of & {*CONVERSATIONS}:
        instead = f"ask {ROUTES[0]} with all messages (client.chat.completions.create); nothing is kept between calls"
    elif of & {*OTHERS}:
        instead = "the policy of this job answers with text, and nothing else is offered"
    else:
        instead = f"there are {', '.join(ROUTES)}; docs/gateway.md has the others"
    return RequestRefused(404, f"there is no {asked} here: {instead}", code="unknown_url")


def telling_what_there_is(metrics: RolloutMetrics) -> Middleware:
    """Return the middleware for an application that has the gateway's routes."""

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        missing = request.match_info.http_exception
        if missing is None:
            return await handler(request)
        allowed = missing.allowed_methods if isinstance(missing, web.HTTPMethodNotAllowed) else ()
        origin = f"{request.scheme}://{request.host}"[:LONGEST]
        refused = no_such_route(request.method, request.path, allowed=allowed, origin=origin)
        metrics.refused_requests.labels(refused.status).inc()
        return web.json_response(refused.body(), status=refused.status, headers=_allow(missing))

    return answer


def _allow(missing: web.HTTPException) -> dict[str, str]:
    return {"Allow": missing.headers["Allow"]} if "Allow" in missing.headers else {}
