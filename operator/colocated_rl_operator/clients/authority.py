"""Issue certificates that prove who may send targets, and who is which member of which job; and data tokens.

The operator's own authority is made at the first start and kept in a Secret of the operator's namespace, never in a
chart, which would make another one at each rendering. Further certificates in `ca.crt`, after the one of `ca.key`, are
authorities that are trusted too: while one replaces another, everybody trusts both. Data tokens follow from a key of
their own, in another Secret, so that either can be replaced without the other. Where a third Secret is named, somebody
else issues the authority (cert-manager), and the first follows it (`keys` of the loop).

The operator's client certificate never leaves the process; its common name alone grants the right to send targets. A
member's certificate is valid only for serving under the name of its pod, and for LEAF_LIFE: the operator's link to the
member renews it when a third of that is left.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import secrets
import ssl
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any, Protocol

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from colocated_rl_api import names
from colocated_rl_api.logs import log
from colocated_rl_api.member_wire import HeldKeys, Keys
from colocated_rl_api.names import JobUid
from colocated_rl_operator.clients.errors import ApiUnreachable, Conflict, NotFound

LOG = logging.getLogger(__name__)

SECRET_NAME = "colocated-rl-authority"
TOKENS_SECRET_NAME = "colocated-rl-tokens"
CA_KEY_FILE = "ca.key"
TOKEN_KEY_FILE = "token.key"
TOKEN_KEY_BYTES = 32
AUTHORITY_LIFE = timedelta(days=3650)
LEAF_LIFE = timedelta(days=30)
RENEWED_BEFORE = timedelta(days=10)  # its end
CLOCK_TOLERANCE = timedelta(days=1)  # of nodes whose clocks differ, and of one that was ahead when it signed


class SecretApi(Protocol):
    """This protocol names the calls of `kube.Kube` that the authority needs."""

    async def read_secret(self, namespace: str, name: str) -> dict[str, Any]: ...
    async def create_secret(self, namespace: str, secret: dict[str, Any]) -> dict[str, Any]: ...
    async def replace_secret(self, namespace: str, secret: dict[str, Any]) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Authority:
    """An authority is a key and its certificate, in memory. others: authorities that are trusted beside it."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate
    others: tuple[x509.Certificate, ...] = ()

    @classmethod
    def new(cls, now: datetime | None = None) -> Authority:
        now, key = now or datetime.now(UTC), ec.generate_private_key(ec.SECP256R1())
        name = _name("colocated-rl authority")
        own_id = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        builder = _builder(name, name, own_id, key, AUTHORITY_LIFE, now).add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        )
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        return cls(key, builder.add_extension(usage, critical=True).sign(key, hashes.SHA256()))

    @classmethod
    def read(cls, files: dict[str, bytes]) -> Authority:
        """Return the authority in the files. Raises ValueError or KeyError if they hold none."""
        return cls._of(files, key_file=CA_KEY_FILE, certificates_file=names.CA_FILE)

    @classmethod
    def issued(cls, files: dict[str, bytes]) -> Authority:
        """Return the authority in files of a Secret of cert-manager's. Raises ValueError or KeyError if they hold none.

        It has to be self-signed. Otherwise everybody would have to trust its issuer too, and whoever has a certificate
        of that could pass for the operator.
        """
        found = cls._of(files, key_file=names.KEY_FILE, certificates_file=names.CERT_FILE)
        certificate = found.certificate
        try:
            certificate.verify_directly_issued_by(certificate)
        except (ValueError, TypeError, InvalidSignature) as error:
            raise ValueError(
                f"{names.CERT_FILE} is not self-signed: its issuer has to be one of kind selfSigned"
            ) from error
        try:
            is_ca = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        except x509.ExtensionNotFound:
            is_ca = False
        if not is_ca:
            raise ValueError(f"{names.CERT_FILE} is of no authority: its Certificate needs isCA: true")
        return cls(found.key, certificate)

    @classmethod
    def _of(cls, files: dict[str, bytes], *, key_file: str, certificates_file: str) -> Authority:
        key = serialization.load_pem_private_key(files[key_file], password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError(f"{key_file} is not an elliptic curve key")
        certificate, *others = x509.load_pem_x509_certificates(files[certificates_file])
        if certificate.public_key() != key.public_key():
            raise ValueError(f"the first certificate of {certificates_file} is not that of {key_file}")
        return cls(key, certificate, tuple(others))

    @property
    def expires(self) -> datetime:
        """Return when its certificate ends, and with it the trust in all that it has issued."""
        return self.certificate.not_valid_after_utc

    @cached_property
    def trusted_pem(self) -> str:
        """Return the certificates of all authorities that are trusted, its own first."""
        return b"".join(map(_certificate_pem, (self.certificate, *self.others))).decode("ascii")

    @property
    def _key_id(self) -> x509.SubjectKeyIdentifier:
        """Return the id of its key as its certificate has it: others make it by another hash, and OpenSSL compares."""
        try:
            return self.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        except x509.ExtensionNotFound:
            return x509.SubjectKeyIdentifier.from_public_key(self.key.public_key())

    def files(self) -> dict[str, bytes]:
        return {names.CA_FILE: self.trusted_pem.encode("ascii"), CA_KEY_FILE: _key_pem(self.key)}

    def issue(
        self, common_name: str, *, purpose: x509.ObjectIdentifier, server_names: Sequence[str], now: datetime
    ) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
        """Return a new key and its certificate. common_name: 64 characters at most."""
        key = ec.generate_private_key(ec.SECP256R1())
        usage = x509.KeyUsage(True, False, False, False, False, False, False, False, False)
        certificate = (
            _builder(self.certificate.subject, _name(common_name), self._key_id, key, LEAF_LIFE, now)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
            .add_extension(x509.SubjectAlternativeName(list(map(x509.DNSName, server_names))), critical=False)
            .sign(self.key, hashes.SHA256())
        )
        return key, certificate


class Keyring:
    """A Keyring issues what the operator and the members of its jobs authenticate with.

    wall: returns the time by which certificates are made and judged.
    """

    def __init__(
        self, authority: Authority, token_key: bytes, *, wall: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        self._wall = wall
        self._use(authority, token_key)

    @property
    def material(self) -> tuple[Authority, bytes]:
        """Return the authority, and the key of data tokens."""
        return self.authority, self._token_key

    def now(self) -> datetime:
        return self._wall()

    def replace(self, authority: Authority, token_key: bytes) -> bool:
        """Issue by these from now on; return whether they are others than before."""
        before = (self.authority.files(), self._token_key)
        self._use(authority, token_key)
        return before != (authority.files(), token_key)

    def _use(self, authority: Authority, token_key: bytes) -> None:
        self.authority, self._token_key = authority, token_key
        self._issuer, self._trusts = _digest(_certificate_pem(authority.certificate)), _digest(authority.trusted_pem)

    def keys(self, member: Keyholder) -> Keys:
        """Return new keys of a member."""
        now = self._wall()
        key, certificate = self.authority.issue(
            member.job_uid, purpose=ExtendedKeyUsageOID.SERVER_AUTH, server_names=member.server_names, now=now
        )
        token = self.token(member)
        return Keys(
            authorities=self.authority.trusted_pem,
            certificate=_certificate_pem(certificate).decode("ascii"),
            key=_key_pem(key).decode("ascii"),
            token=token,
            held=HeldKeys(
                issuer=self._issuer, trusts=self._trusts, token=_digest(token), ends=certificate.not_valid_after_utc
            ),
        )

    def is_current(self, held: HeldKeys, member: Keyholder) -> bool:
        """Return whether the member needs no others yet, by its own word: whatever it says must be borne.

        Keys that last for longer than they may are of a clock that was ahead, and not valid yet.
        """
        present = (self._issuer, self._trusts, _digest(self.token(member)))
        lasts = held.ends - self._wall()
        return (held.issuer, held.trusts, held.token) == present and (
            RENEWED_BEFORE < lasts <= LEAF_LIFE + CLOCK_TOLERANCE
        )

    def mark(self, member: Keyholder) -> str:
        """Return what a pod is marked with that is made with present keys: it changes with authority and token."""
        return _digest(f"{self._issuer} {self._trusts} {self.token(member)}")

    def token(self, member: Keyholder) -> str:
        """Return the job's data token. Another name of the token is another token."""
        info = f"data token {member.token_name} of {member.job_uid}".encode()
        return HKDF(hashes.SHA256(), length=32, salt=None, info=info).derive(self._token_key).hex()

    def operator_context(self) -> ssl.SSLContext:
        """Return the client side of control ports: it trusts the authorities alone, and shows a new certificate."""
        name = names.OPERATOR_CLIENT_NAME
        key, certificate = self.authority.issue(
            name, purpose=ExtendedKeyUsageOID.CLIENT_AUTH, server_names=[name], now=self._wall()
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_verify_locations(cadata=self.authority.trusted_pem)
        with tempfile.NamedTemporaryFile(suffix=".pem") as file:  # ssl reads certificates from files alone; 0600
            file.write(_certificate_pem(certificate) + _key_pem(key))
            file.flush()
            context.load_cert_chain(file.name)
        return context


@dataclass(frozen=True)
class Keyholder:
    """A Keyholder is a pod that gets keys. token_name: which data token the job has, as its annotation says."""

    job_uid: JobUid
    pod: str
    role: str
    token_name: str = ""

    @property
    def server_names(self) -> Sequence[str]:
        """Return its TLS names. The rollout controller has clients that know the job alone."""
        own = [names.pod_server_name(self.job_uid, self.pod)]
        return [*own, names.member_server_name(self.job_uid)] if self.role == names.ROLE_ROLLOUT else own


def secret_files(keys: Keys) -> dict[str, str]:
    """Return the files of `names.TLS_DIR`."""
    assert keys.held is not None
    return {
        names.CA_FILE: keys.authorities,
        names.CERT_FILE: keys.certificate,
        names.KEY_FILE: keys.key,
        names.DATA_TOKEN_FILE: keys.token,
        names.HELD_KEYS_FILE: keys.held.model_dump_json(by_alias=True),
    }


async def find_keyring(api: SecretApi, namespace: str, issued: str = "") -> Keyring:
    """Return the keyring of the operator's namespace; create what it lacks. Raises ApiError.

    issued: the Secret of which a new authority is taken; "": the operator makes one.
    """
    authority = await find_authority(api, namespace, issued)
    return Keyring(authority, await _find_token_key(api, namespace))


async def read_again(api: SecretApi, namespace: str, keyring: Keyring) -> bool:
    """Read both Secrets again; return whether they have changed. Raises ApiError, NotFound too: nothing is made."""
    authority = _from_secret(await api.read_secret(namespace, SECRET_NAME), namespace)
    token_key = _token_key(await api.read_secret(namespace, TOKENS_SECRET_NAME), namespace)
    return keyring.replace(authority, token_key)


async def _find_token_key(api: SecretApi, namespace: str) -> bytes:
    async def new() -> dict[str, bytes]:
        return {TOKEN_KEY_FILE: secrets.token_bytes(TOKEN_KEY_BYTES)}

    secret, _ = await _read_or_create(api, namespace, TOKENS_SECRET_NAME, new)
    return _token_key(secret, namespace)


def _token_key(secret: dict[str, Any], namespace: str) -> bytes:
    data = (secret.get("data") or {}).get(TOKEN_KEY_FILE, "")
    try:
        key = base64.b64decode(data, validate=True)
    except ValueError:
        key = b""
    if len(key) < TOKEN_KEY_BYTES:
        raise ApiUnreachable(
            f"Secret {namespace}/{TOKENS_SECRET_NAME} has no {TOKEN_KEY_FILE} of {TOKEN_KEY_BYTES} bytes: delete it, "
            "and all data tokens are made anew"
        )
    return key


async def find_authority(api: SecretApi, namespace: str, issued: str = "") -> Authority:
    """Return the authority in the operator's namespace; create it if there is none. Raises ApiError."""

    async def new() -> dict[str, bytes]:
        return (await read_issued(api, namespace, issued) if issued else Authority.new()).files()

    secret, was_made = await _read_or_create(api, namespace, SECRET_NAME, new)
    if was_made:
        reason = f"there was no Secret {namespace}/{SECRET_NAME}: older jobs trust another one"
        log(LOG, "authority made", reason=reason)
    return _from_secret(secret, namespace)


async def read_issued(api: SecretApi, namespace: str, name: str) -> Authority:
    """Return the authority that somebody else issues. Raises ApiError."""
    try:
        secret = await api.read_secret(namespace, name)
    except NotFound as error:
        raise ApiUnreachable(
            f"Secret {namespace}/{name} is not there, of which the authority is taken: cert-manager has not made it "
            f"(kubectl -n {namespace} describe certificate), or the chart's authority.secretName is another"
        ) from error
    try:
        return Authority.issued(_files(secret))
    except (KeyError, ValueError) as error:
        raise ApiUnreachable(f"Secret {namespace}/{name} has no authority to take ({error!r})") from error


async def write_authority(api: SecretApi, namespace: str, authority: Authority) -> None:
    """Put the authority in the place of the present one. Raises ApiError, a Conflict if somebody else just did so."""
    present = await api.read_secret(namespace, SECRET_NAME)
    await api.replace_secret(namespace, present | {"data": _encoded(authority.files())})


async def _read_or_create(
    api: SecretApi, namespace: str, name: str, new: Callable[[], Awaitable[Mapping[str, bytes]]]
) -> tuple[dict[str, Any], bool]:
    """Return a Secret, and whether it was made of new files because there was none."""
    try:
        return await api.read_secret(namespace, name), False
    except NotFound:
        secret = _secret(name, await new(), namespace)
    try:
        await api.create_secret(namespace, secret)
    except Conflict:  # another replica was first
        return await api.read_secret(namespace, name), False
    return secret, True


def _from_secret(secret: dict[str, Any], namespace: str) -> Authority:
    try:
        return Authority.read(_files(secret))
    except (KeyError, ValueError) as error:
        raise ApiUnreachable(
            f"Secret {namespace}/{SECRET_NAME} holds no authority ({error!r}): restore it, or delete it together with "
            "all jobs, whose members trust the lost one"
        ) from error


def _secret(name: str, files: Mapping[str, bytes], namespace: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": {names.MANAGED_BY_LABEL: names.MANAGED_BY},
        },
        "data": _encoded(files),
    }


def _encoded(files: Mapping[str, bytes]) -> dict[str, str]:
    return {file: base64.b64encode(data).decode("ascii") for file, data in files.items()}


def _files(secret: dict[str, Any]) -> dict[str, bytes]:
    return {name: base64.b64decode(data) for name, data in secret["data"].items()}


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _builder(
    issuer: x509.Name,
    subject: x509.Name,
    issuer_id: x509.SubjectKeyIdentifier,
    key: ec.EllipticCurvePrivateKey,
    life: timedelta,
    now: datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .issuer_name(issuer)
        .subject_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_TOLERANCE)
        .not_valid_after(now + life)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer_id), critical=False)
    )


def _digest(content: str | bytes) -> str:
    data = content.encode("ascii") if isinstance(content, str) else content
    return hashlib.sha256(data).hexdigest()[:32]


def _certificate_pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
