"""This module forms a port's answers when the framework itself refuses a request, or a route failed.

Every port uses the shape of OpenAI's API: a gateway is behind some of them, and its clients read no other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from colocated_rl_api.logs import log

LOG = logging.getLogger(__name__)


def error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return the body of an error with this status, in the shape of OpenAI's API."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    kind = "rate_limit_error" if status == 429 else kind
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class MemberConnection(web.RequestHandler):
    """A MemberConnection is one caller's. closed: called with it once it is gone."""

    __slots__ = ("_closed",)

    def __init__(self, *arguments: Any, closed: Callable[[MemberConnection], None], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._closed = closed

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._closed(self)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if isinstance(exc, HttpProcessingError):
            why = exc.message.partition(":")[0]  # the rest quotes the caller, perhaps a token: never log it
            log(LOG, "request unreadable", logging.DEBUG, reason=why)
            message = f"this can't be read as a request of HTTP: {why}"
        else:
            super().handle_error(request, status, exc, message)  # for its log; raises if an answer has begun
            message = f"{HTTPStatus(status).phrase}: see the log of this pod"
        answer = web.json_response(error_body(status, message), status=status)
        answer.force_close()
        return answer
