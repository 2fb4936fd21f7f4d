"""This module authenticates a member's callers with TLS contexts and the data token, read from the job's Secret.

There are three parties with three proofs. The operator shows a client certificate of the authority with its common
name: only that gives the right to send targets. Members of the job show the data token, which opens data ports alone.
Every caller checks the member's certificate against the authority and the job's name, never an address, which changes.
"""

from __future__ import annotations

import hmac
import ssl
from dataclasses import dataclass
from pathlib import Path

from colocated_rl_api import names

MIN_TOKEN_CHARS = 16


@dataclass(frozen=True)
class MemberTls:
    """A MemberTls holds the files of `names.TLS_DIR`. Raises ValueError or OSError at start if one is unusable."""

    directory: Path
    token: str

    @classmethod
    def read(cls, directory: Path = Path(names.TLS_DIR)) -> MemberTls:
        path = directory / names.DATA_TOKEN_FILE
        token = path.read_text(encoding="ascii").strip()
        if len(token) < MIN_TOKEN_CHARS:
            raise ValueError(f"{path}: a data token has at least {MIN_TOKEN_CHARS} characters, this one {len(token)}")
        return cls(directory, token)

    def control_context(self) -> ssl.SSLContext:
        """Return the control port's context: a caller without a certificate of the authority gets no answer at all."""
        context = self.data_context()
        context.load_verify_locations(self.directory / names.CA_FILE)
        context.verify_mode = ssl.CERT_REQUIRED
        return context

    def data_context(self) -> ssl.SSLContext:
        """Return the data port's context, without client certificates: callers show the token."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(self.directory / names.CERT_FILE, self.directory / names.KEY_FILE)
        return context

    def client_context(self) -> ssl.SSLContext:
        """Return the context of a client of data ports, which trusts the authority and nothing else."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_verify_locations(self.directory / names.CA_FILE)
        return context

    def admits(self, authorization: str | None) -> bool:
        """Return whether an Authorization header carries the data token, in the same time for every wrong one."""
        shown = (authorization or "").encode(errors="surrogateescape")  # as aiohttp has a header that is no UTF-8
        return hmac.compare_digest(shown, self.authorization.encode())

    @property
    def authorization(self) -> str:
        """Return the Authorization header for calls to data ports."""
        return f"Bearer {self.token}"


def is_operator(peer_certificate: object) -> bool:
    """Return whether a verified peer certificate (`SSLSocket.getpeercert()`) is the operator's.

    Members' own certificates come from the same authority, so being verified is not enough.
    """
    if not isinstance(peer_certificate, dict):
        return False
    subject: tuple[tuple[tuple[str, str], ...], ...] = peer_certificate.get("subject", ())
    common_names = [value for part in subject for key, value in part if key == "commonName"]
    return common_names == [names.OPERATOR_CLIENT_NAME]
