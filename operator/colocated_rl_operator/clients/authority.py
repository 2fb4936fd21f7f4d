"""Issue certificates that prove who may send targets, and who is a member of which job.

The operator's own authority is made at the first start and kept in a Secret of the operator's namespace, never in a
chart, which would make another one at each rendering. The operator's client certificate is made anew at each start,
never leaves the process and lasts as long as the process may run; its common name alone grants the right to send
targets. A job's certificate is valid only for serving under the job's name.
"""

from __future__ import annotations

import base64
import logging
import ssl
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from colocated_rl_api import names
from colocated_rl_api.logs import log
from colocated_rl_api.names import JobUid
from colocated_rl_operator.clients.errors import ApiUnreachable, Conflict, NotFound

LOG = logging.getLogger(__name__)

SECRET_NAME = "colocated-rl-authority"
CA_KEY_FILE = "ca.key"
AUTHORITY_LIFE = timedelta(days=3650)
JOB_LIFE = timedelta(days=1825)
CLOCK_TOLERANCE = timedelta(days=1)  # of nodes whose clocks differ, and of one that was ahead when it signed


class SecretApi(Protocol):
    """This protocol names the calls of `kube.Kube` that the authority needs."""

    async def read_secret(self, namespace: str, name: str) -> dict[str, Any]: ...
    async def create_secret(self, namespace: str, secret: dict[str, Any]) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Authority:
    """An authority is a key and its certificate, in memory."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @classmethod
    def new(cls) -> Authority:
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name("colocated-rl authority")
        builder = _builder(name, name, key, key, AUTHORITY_LIFE).add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        )
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        return cls(key, builder.add_extension(usage, critical=True).sign(key, hashes.SHA256()))

    @classmethod
    def read(cls, files: dict[str, bytes]) -> Authority:
        """Return the authority in the files. Raises ValueError or KeyError if they hold none."""
        key = serialization.load_pem_private_key(files[CA_KEY_FILE], password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError(f"{CA_KEY_FILE} is not an elliptic curve key")
        return cls(key, x509.load_pem_x509_certificate(files[names.CA_FILE]))

    @property
    def expires(self) -> datetime:
        """Return when its certificate ends, and with it the trust in all that it has issued."""
        return self.certificate.not_valid_after_utc

    def files(self) -> dict[str, bytes]:
        return {names.CA_FILE: _certificate_pem(self.certificate), CA_KEY_FILE: _key_pem(self.key)}

    def job_files(self, job_uid: JobUid) -> dict[str, str]:
        """Return the files of `names.TLS_DIR`, which all members of the job share: one certificate, one data token."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._issue(
            job_uid, key, JOB_LIFE, ExtendedKeyUsageOID.SERVER_AUTH, names.member_server_name(job_uid)
        )
        return {
            names.CA_FILE: _certificate_pem(self.certificate).decode("ascii"),
            names.CERT_FILE: _certificate_pem(certificate).decode("ascii"),
            names.KEY_FILE: _key_pem(key).decode("ascii"),
            names.DATA_TOKEN_FILE: self._data_token(job_uid),
        }

    def _data_token(self, job_uid: JobUid) -> str:
        secret = self.key.private_numbers().private_value.to_bytes((self.key.key_size + 7) // 8)
        return (
            HKDF(hashes.SHA256(), length=32, salt=None, info=f"data token of {job_uid}".encode()).derive(secret).hex()
        )

    def operator_context(self) -> ssl.SSLContext:
        """Return the client side of control ports: it trusts this authority alone, shows the operator's certificate."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = names.OPERATOR_CLIENT_NAME
        certificate = self._issue(name, key, AUTHORITY_LIFE, ExtendedKeyUsageOID.CLIENT_AUTH, name)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_verify_locations(cadata=_certificate_pem(self.certificate).decode("ascii"))
        with tempfile.NamedTemporaryFile(suffix=".pem") as file:  # ssl reads certificates from files alone; 0600
            file.write(_certificate_pem(certificate) + _key_pem(key))
            file.flush()
            context.load_cert_chain(file.name)
        return context

    def _issue(
        self,
        common_name: str,
        key: ec.EllipticCurvePrivateKey,
        life: timedelta,
        purpose: x509.ObjectIdentifier,
        server_name: str,
    ) -> x509.Certificate:
        usage = x509.KeyUsage(True, False, False, False, False, False, False, False, False)
        return (
            _builder(self.certificate.subject, _name(common_name), self.key, key, life)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(server_name)]), critical=False)
            .sign(self.key, hashes.SHA256())
        )


async def find_authority(api: SecretApi, namespace: str) -> Authority:
    """Return the authority in the operator's namespace; create it if there is none. Raises ApiError."""
    try:
        return _from_secret(await api.read_secret(namespace, SECRET_NAME), namespace)
    except NotFound:
        made = Authority.new()
    try:
        await api.create_secret(namespace, _secret(made, namespace))
    except Conflict:  # another replica was first
        return _from_secret(await api.read_secret(namespace, SECRET_NAME), namespace)
    log(LOG, "authority made", reason=f"there was no Secret {namespace}/{SECRET_NAME}: older jobs trust another one")
    return made


def _from_secret(secret: dict[str, Any], namespace: str) -> Authority:
    try:
        return Authority.read({name: base64.b64decode(data) for name, data in secret["data"].items()})
    except (KeyError, ValueError) as error:
        raise ApiUnreachable(
            f"Secret {namespace}/{SECRET_NAME} holds no authority ({error!r}): restore it, or delete it together with "
            "all jobs, whose members trust the lost one"
        ) from error


def _secret(authority: Authority, namespace: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "metadata": {
            "name": SECRET_NAME,
            "namespace": namespace,
            "labels": {names.MANAGED_BY_LABEL: names.MANAGED_BY},
        },
        "data": {name: base64.b64encode(data).decode("ascii") for name, data in authority.files().items()},
    }


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _builder(
    issuer: x509.Name,
    subject: x509.Name,
    issuer_key: ec.EllipticCurvePrivateKey,
    key: ec.EllipticCurvePrivateKey,
    life: timedelta,
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    issuer_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    return (
        x509.CertificateBuilder()
        .issuer_name(issuer)
        .subject_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_TOLERANCE)
        .not_valid_after(now + life)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(issuer_id, critical=False)
    )


def _certificate_pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
