"""This module authenticates a member's callers with TLS contexts and the data token, from its Secret and the operator.

There are three parties with three proofs. The operator shows a client certificate of an authority with its common
name: only that gives the right to send targets. Members of the job show the data token, which opens data ports alone.
Every caller checks the member's certificate against the authorities and the pod's name, never an address, which
changes.

The operator renews all of it over its connection, before the certificate ends and when authority or token change.
Connections that stand go on: only the next handshakes use what is new. Members get a new token one after the other, so
each shows the former one for a while longer, and admits it for longer still.
"""

from __future__ import annotations

import hmac
import os
import ssl
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from colocated_rl_api import names
from colocated_rl_api.member_wire import HeldKeys, Keys

MIN_TOKEN_CHARS = 16
KEPT_FILE = "keys.json"
FORMER_SHOWN_S = 30.0  # a new token is shown after so long: until then others may not have it
FORMER_ADMITTED_S = 120.0


class MemberTls:
    """A MemberTls holds a member's keys, and its TLS contexts, which are made of them.

    kept: directory for what is renewed, which outlives the process and not the pod; None keeps it in the process.
    Raises ValueError or OSError if they are unusable.
    """

    def __init__(self, keys: Keys, *, kept: Path | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._kept, self._clock = kept, clock
        self._former = (keys.token, clock() - FORMER_ADMITTED_S)  # and when it was replaced
        self._keys = keys
        self._control, self._data = _server_contexts(keys)
        self._client = _client_context(keys)

    @classmethod
    def read(cls, directory: Path = Path(names.TLS_DIR), *, kept: Path | None = None) -> MemberTls:
        """Return the keys of the pod's Secret, or newer ones in `kept`."""
        kept = kept if kept is not None and kept.is_dir() else None
        keys = _of_secret(directory)
        if kept is not None and (kept / KEPT_FILE).exists():
            keys = Keys.model_validate_json((kept / KEPT_FILE).read_bytes(), extra="ignore")
        return cls(keys, kept=kept)

    @property
    def held(self) -> HeldKeys | None:
        """Return what the operator is told of the keys; None for those of an older operator, which renews none."""
        return self._keys.held

    def take(self, keys: Keys) -> None:
        """Use these keys from the next handshake on. Raises ValueError or OSError, and then changes nothing."""
        control, data = _server_contexts(keys)
        is_same = keys.authorities == self._keys.authorities
        client = self._client if is_same else _client_context(keys)  # another one opens all its connections anew
        if self._kept is not None:
            _replace(self._kept / KEPT_FILE, keys.model_dump_json(by_alias=True).encode())
        if keys.token != self._keys.token:
            self._former = (self._keys.token, self._clock())
        self._keys, self._control, self._data, self._client = keys, control, data, client

    def control_context(self) -> ssl.SSLContext:
        """Return the control port's context: a caller without a certificate of an authority gets no answer at all."""
        return self._control

    def data_context(self) -> ssl.SSLContext:
        """Return the data port's context, without client certificates: callers show the token."""
        return self._data

    def client_context(self) -> ssl.SSLContext:
        """Return the context of a client of data ports, which trusts the authorities and nothing else."""
        return self._client

    def admits(self, authorization: str | None) -> bool:
        """Return whether an Authorization header carries the data token, in the same time for every wrong one."""
        shown = (authorization or "").encode(errors="surrogateescape")  # as aiohttp has a header that is no UTF-8
        is_present = hmac.compare_digest(shown, _bearer(self._keys.token).encode())
        is_former = hmac.compare_digest(shown, _bearer(self._former[0]).encode())
        return is_present or (is_former and self._former_s() < FORMER_ADMITTED_S)

    @property
    def authorization(self) -> str:
        """Return the Authorization header for calls to data ports."""
        return _bearer(self._former[0] if self._former_s() < FORMER_SHOWN_S else self._keys.token)

    def _former_s(self) -> float:
        return self._clock() - self._former[1]


def is_operator(peer_certificate: object) -> bool:
    """Return whether a verified peer certificate (`SSLSocket.getpeercert()`) is the operator's.

    Members' own certificates come from the same authority, so being verified is not enough.
    """
    if not isinstance(peer_certificate, dict):
        return False
    subject: tuple[tuple[tuple[str, str], ...], ...] = peer_certificate.get("subject", ())
    common_names = [value for part in subject for key, value in part if key == "commonName"]
    return common_names == [names.OPERATOR_CLIENT_NAME]


def _of_secret(directory: Path) -> Keys:
    def text(name: str) -> str:
        return (directory / name).read_text(encoding="ascii")

    held = directory / names.HELD_KEYS_FILE
    return Keys(
        authorities=text(names.CA_FILE),
        certificate=text(names.CERT_FILE),
        key=text(names.KEY_FILE),
        token=text(names.DATA_TOKEN_FILE).strip(),
        held=HeldKeys.model_validate_json(held.read_bytes(), extra="ignore") if held.exists() else None,
    )


def _server_contexts(keys: Keys) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the contexts of control port and data port. Raises ValueError or OSError."""
    if len(keys.token) < MIN_TOKEN_CHARS:
        raise ValueError(
            f"{names.DATA_TOKEN_FILE}: a data token has at least {MIN_TOKEN_CHARS} characters, this one has "
            f"{len(keys.token)}: recreate the job"
        )
    data, control = (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER) for _ in range(2))
    with tempfile.NamedTemporaryFile(suffix=".pem", dir=_memory()) as file:  # ssl reads certificates from files; 0600
        file.write((keys.certificate + keys.key).encode("ascii"))
        file.flush()
        for context in (data, control):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.load_cert_chain(file.name)
    control.load_verify_locations(cadata=keys.authorities)
    control.verify_mode = ssl.CERT_REQUIRED
    return control, data


def _client_context(keys: Keys) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=keys.authorities)
    return context


def _memory() -> Path | None:
    """Return the volume in memory for the file of a moment, so that no key is written to a disk; None without one."""
    directory = Path(names.KEYS_DIR)
    return directory if os.access(directory, os.W_OK) else None


def _replace(path: Path, content: bytes) -> None:
    """Write the file as a whole or not at all."""
    beside = path.with_suffix(".new")
    beside.touch(mode=0o600)
    beside.write_bytes(content)
    beside.replace(path)


def _bearer(token: str) -> str:
    return f"Bearer {token}"
