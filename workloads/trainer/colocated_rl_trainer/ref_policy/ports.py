"""Serve the two ports of a reference: scores behind TLS and the job's data token, and metrics for anybody.

They need the standard library alone, so any image with a trainer will do. A request without the token is answered
before its body is read, and a connection without it is closed soon; connections, bodies and waits are bounded.

A reference beside engines has a Unix socket in their place, for the pod's agent.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import socket
import socketserver
import ssl
import threading
import time
from http import HTTPStatus
from pathlib import Path

from colocated_rl_api import descriptors, names, reference_wire
from colocated_rl_api.listening import listen
from colocated_rl_api.logs import in_words
from colocated_rl_api.reference_wire import MAX_SAMPLE_BYTES, SCORE_TYPE, ScoreError
from colocated_rl_trainer.protocol.http_handler import ConnectionThreads, JSONHandler, Rejected
from colocated_rl_trainer.ref_policy.score_requests import ScoreRequests

_LOG = logging.getLogger(__name__)

UNAUTHENTICATED_S = 10.0  # for the handshake, and for a caller to show the token
IDLE_S = 900.0  # of a connection that has shown the token
GIVES_WAY_S = 5.0  # for the thread of a connection that makes room to end, where scoring has the cores
AGAIN_S = 0.1  # after an accept for which there was no descriptor
MAX_CONNECTIONS = 512  # of each port, and a quarter of the descriptors at most
MIN_TOKEN_CHARS = 16


class _Port(ConnectionThreads, socketserver.TCPServer):
    """Gives each connection a thread, up to MAX_CONNECTIONS. The oldest stranger makes room for one more.

    Strangers are connections that have not shown the token, or all of them where none is asked for. Without one, what
    comes is closed at once.
    """

    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, handler: type[_PortHandler]) -> None:
        self._room = threading.BoundedSemaphore(min(MAX_CONNECTIONS, max(1, descriptors.limit() // 4)))
        self._troubled = descriptors.Seldom()
        self._strangers: dict[socket.socket, None] = {}
        self._lock = threading.Lock()  # of the line above
        super().__init__((host, port), handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listen(host, port, backlog=self.request_queue_size)

    @property
    def number(self) -> int:
        return int(self.socket.getsockname()[1])

    def listen(self, name: str) -> None:
        """Serve from now on, in a thread of this name."""
        threading.Thread(target=self.serve_forever, name=name, daemon=True).start()

    def get_request(self) -> tuple[socket.socket, object]:
        """Accept a connection. Raises OSError, after a pause without a descriptor: the caller retries at once."""
        try:
            return super().get_request()
        except OSError as error:
            if descriptors.is_exhausted(error):
                self._troubled.log(_LOG, "connections refused", reason=in_words(error))
                time.sleep(AGAIN_S)
            raise

    def process_request(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        connection = request[1] if isinstance(request, tuple) else request
        has_room = self._room.acquire(blocking=False)
        if not has_room and self._end_oldest_stranger():
            has_room = self._room.acquire(timeout=GIVES_WAY_S)
        if not has_room:
            self.shutdown_request(request)
            return
        with self._lock:
            self._strangers[connection] = None
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread was started that would release the place
            self.is_no_stranger(connection)
            self._room.release()
            raise

    def _end_oldest_stranger(self) -> bool:
        """Return whether there was one."""
        with self._lock:
            oldest = next(iter(self._strangers), None)
            if oldest is None:
                return False
            del self._strangers[oldest]
            with contextlib.suppress(OSError):  # it has gone
                socket.socket.shutdown(oldest, socket.SHUT_RDWR)  # under TLS, whose state is its thread's
            return True

    def is_no_stranger(self, connection: socket.socket) -> None:
        with self._lock:
            self._strangers.pop(connection, None)

    def process_request_thread(
        self, request: socket.socket | tuple[bytes, socket.socket], client_address: object
    ) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.is_no_stranger(request[1] if isinstance(request, tuple) else request)
            self._room.release()


class ScorePort(_Port):
    """Serves POST /v1/score. tls: the files of `names.TLS_DIR`. unauthenticated_s: for a caller to show the token.

    Raises ValueError or OSError when a file is unusable, or the port is taken.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        tls: Path,
        requests: ScoreRequests,
        unauthenticated_s: float = UNAUTHENTICATED_S,
    ) -> None:
        path = tls / names.DATA_TOKEN_FILE
        token = path.read_text(encoding="ascii").strip()
        if len(token) < MIN_TOKEN_CHARS:
            raise ValueError(f"{path}: a data token has at least {MIN_TOKEN_CHARS} characters, this one {len(token)}")
        self._authorization = f"Bearer {token}".encode()
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_3
        self._context.load_cert_chain(tls / names.CERT_FILE, tls / names.KEY_FILE)
        self.requests, self.unauthenticated_s = requests, unauthenticated_s
        super().__init__(host, port, _ScoreHandler)

    def admits(self, authorization: str) -> bool:
        """Compare with the data token, in the same time for each wrong one."""
        return hmac.compare_digest(authorization.encode(), self._authorization)

    def get_request(self) -> tuple[socket.socket, object]:
        """Accept without the handshake, which the handler makes: a slow caller delays itself alone."""
        connection, address = super().get_request()
        wrapped = self._context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return wrapped, address


class MetricsPort(_Port):
    """Serves health and metrics."""

    def __init__(self, host: str, port: int, *, requests: ScoreRequests) -> None:
        self.requests = requests
        super().__init__(host, port, _MetricsHandler)


class _PortHandler(JSONHandler):
    error_type = ScoreError
    timeout = UNAUTHENTICATED_S
    disable_nagle_algorithm = True

    def send_response(self, code: int, message: str | None = None) -> None:
        """Name no program and no version to strangers, and announce when the connection closes."""
        self.send_response_only(code, message)
        if self.close_connection:
            self.send_header("Connection", "close")


class _ScoreHandler(_PortHandler):
    server: ScorePort

    def setup(self) -> None:
        """Limit the time without a token as a whole: the socket's own timeout counts anew from each byte."""
        limit_s = self.server.unauthenticated_s
        self._unauthenticated = threading.Timer(limit_s, self._close_connection)
        self._unauthenticated.daemon = True
        self._unauthenticated.start()
        self.request.settimeout(limit_s)
        try:
            self.request.do_handshake()
        except OSError:
            self._unauthenticated.cancel()
            raise
        super().setup()
        self.request.settimeout(limit_s)

    def finish(self) -> None:
        self._unauthenticated.cancel()
        super().finish()

    def _close_connection(self) -> None:
        with contextlib.suppress(OSError):  # the caller has disconnected
            socket.socket.shutdown(self.request, socket.SHUT_RDWR)  # under TLS, whose state is the other thread's

    def do_POST(self) -> None:  # noqa: N802 - the name that http.server calls
        try:
            answer = self._answer()
        except Rejected as rejected:
            self.reject(rejected)
        else:
            self.write(HTTPStatus.OK, answer, SCORE_TYPE)

    def _answer(self) -> bytes:
        port = self.server
        if not port.admits(self.headers.get("Authorization", "")):
            self.close_connection = True  # a caller without the token keeps no connection
            raise Rejected(HTTPStatus.UNAUTHORIZED, "TokenNeeded", "Authorization: Bearer, and the job's data token")
        self._unauthenticated.cancel()
        port.is_no_stranger(self.connection)
        self.connection.settimeout(IDLE_S)
        return port.requests.answer(self.path, _read_sample(self))


class _MetricsHandler(_PortHandler):
    server: MetricsPort

    def do_GET(self) -> None:  # noqa: N802 - the name that http.server calls
        match self.path.partition("?")[0]:
            case "/healthz":
                self.write(HTTPStatus.OK, b"ok\n", "text/plain")
            case reference_wire.READY_PATH:
                _write_readiness(self, self.server.requests)
            case "/metrics":
                text, kind = self.server.requests.figures.text()
                self.write(HTTPStatus.OK, text, kind)
            case _:
                self.send_error(HTTPStatus.NOT_FOUND)


class AgentSocket(ConnectionThreads, socketserver.UnixStreamServer):
    """Serves POST /v1/score and GET /readyz on a Unix socket that the pod's group may use.

    The pod's agent has checked the token of who asks, and bounds what comes in.
    """

    request_queue_size = 128

    def __init__(self, path: Path, requests: ScoreRequests) -> None:
        self.requests = requests
        path.unlink(missing_ok=True)  # left by an earlier process, which the runner has reaped
        super().__init__(str(path), _SocketHandler)
        path.chmod(0o660)  # agent and reference have different users


class _SocketHandler(JSONHandler):
    error_type = ScoreError
    timeout = IDLE_S
    server: AgentSocket

    def do_GET(self) -> None:  # noqa: N802 - the name that http.server calls
        if self.path == reference_wire.READY_PATH:
            _write_readiness(self, self.server.requests)
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def do_POST(self) -> None:  # noqa: N802 - the name that http.server calls
        try:
            answer = self.server.requests.answer(self.path, _read_sample(self))
        except Rejected as rejected:
            self.reject(rejected)
        else:
            self.write(HTTPStatus.OK, answer, SCORE_TYPE)


def _read_sample(handler: JSONHandler) -> bytes:
    """Return the body of a request for scores. Raises Rejected, ConnectionResetError."""
    body = handler.read_body(limit_bytes=MAX_SAMPLE_BYTES)
    if len(body) < int(handler.headers["Content-Length"]):
        raise ConnectionResetError("the caller has gone")
    return body


def _write_readiness(handler: JSONHandler, requests: ScoreRequests) -> None:
    if requests.is_ready:
        handler.write(HTTPStatus.OK, b"ok\n", "text/plain")
    else:
        handler.write(HTTPStatus.SERVICE_UNAVAILABLE, b"the model is being loaded\n", "text/plain")
