"""A connection of a port: what its caller is told where the framework refuses by itself, or a route failed.

In the shape of OpenAI's API on every port: a gateway is behind some of them, and its clients read no other.
"""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from colocated_rl_api.logs import log

LOG = logging.getLogger(__name__)


def error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The body of an error with this status, as OpenAI's API has it."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    kind = "rate_limit_error" if status == 429 else kind
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class MemberConnection(web.RequestHandler):
    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if isinstance(exc, HttpProcessingError):
            why = exc.message.partition(":")[0]  # then come the caller's own words, a token perhaps: no log gets them
            log(LOG, "request unreadable", logging.DEBUG, reason=why)
            told = f"this can't be read as a request of HTTP: {why}"
        else:
            super().handle_error(request, status, exc, message)  # for its log; raises where an answer has begun
            told = f"{HTTPStatus(status).phrase}: see the log of this pod"
        answer = web.json_response(error_body(status, told), status=status)
        answer.force_close()
        return answer
