"""Share between the trainer's HTTP servers: a thread for each connection, bounded bodies, JSON answers and errors.

A server adds its socket, its routes, and its own limits and deadlines. Standard library and pydantic only.
"""

from __future__ import annotations

import http.server
import logging
import socket
import socketserver
import sys
from http import HTTPStatus

from colocated_rl_api.reference_wire import ScoreError
from colocated_rl_api.trainer_wire import TrainerError
from colocated_rl_api.wire import Wire

_LOG = logging.getLogger(__name__)


class Rejected(Exception):
    """The request is answered with an error. error: CamelCase, stable."""

    def __init__(self, code: HTTPStatus, error: str, message: str) -> None:
        super().__init__(message)
        self.code, self.error = code, error


class ConnectionThreads(socketserver.ThreadingMixIn):
    """Gives each connection a thread, which does not keep the process alive."""

    daemon_threads = True

    def handle_error(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        """Log a bug. A caller that disconnected gets no answer: it may ask again."""
        if not isinstance(sys.exc_info()[1], OSError):
            _LOG.error("request not answered", exc_info=True)


class JSONHandler(http.server.BaseHTTPRequestHandler):
    """Speaks HTTP/1.1 and answers errors as JSON of `error_type`."""

    protocol_version = "HTTP/1.1"
    error_type: type[TrainerError | ScoreError]
    path = ""  # while no request line could be read

    def read_body(self, *, limit_bytes: int) -> bytes:
        """Return the body, shorter than announced if the caller disconnected. Raises Rejected for a bad length."""
        size = self.headers.get("Content-Length", "")
        if not (size.isascii() and size.isdigit() and len(size) < 10) or int(size) > limit_bytes:
            self.close_connection = True  # what follows could be taken for a next request
            raise Rejected(HTTPStatus.BAD_REQUEST, "BadRequest", f"Content-Length must be 0 to {limit_bytes}")
        return self.rfile.read(int(size))

    def write(self, code: HTTPStatus, content: bytes, content_type: str) -> None:
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def write_json(self, code: HTTPStatus, body: Wire) -> None:
        self.write(code, body.model_dump_json(by_alias=True).encode(), "application/json")

    def reject(self, rejected: Rejected) -> None:
        self.write_json(rejected.code, self.error_type(error=rejected.error, message=str(rejected)))

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer what the base class rejects by itself with an error of the protocol."""
        status = HTTPStatus(code)
        self.close_connection = True
        text = message or f"{self.command} {self.path}: {status.description}"
        self.reject(Rejected(status, status.phrase.title().replace(" ", ""), text))

    def log_message(self, *_: object) -> None:
        """Log nothing: transitions and failed passes are logged where they happen, requests are not."""
