"""A certificate authority for one test, and the Secret directory of a member made from it."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from colocated_rl_api import names
from colocated_rl_operator.clients.authority import CLOCK_TOLERANCE


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


@dataclass(frozen=True)
class FakeAuthority:
    """Issues certificates that hold for `life`, and from as long before as the operator's."""

    key: ec.EllipticCurvePrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))
    life: timedelta = timedelta(days=2)

    @property
    def certificate(self) -> x509.Certificate:
        return self._sign("test authority", self.key, authority=True)

    def member_directory(self, directory: Path, *, job_uid: names.JobUid, token: str) -> Path:
        """Files of `names.TLS_DIR` for any member of the job."""
        directory.mkdir(parents=True, exist_ok=True)
        own = names.member_server_name(job_uid)
        self._write(directory, common_name=job_uid[:64], server_names=(own, f"*.{own}"))
        (directory / names.DATA_TOKEN_FILE).write_text(token + "\n")
        return directory

    def client_context(self, directory: Path, *, common_name: str = names.OPERATOR_CLIENT_NAME) -> ssl.SSLContext:
        """Return the context of a caller that trusts the authority and presents its
        certificate; `directory` keeps the files.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self._write(directory, common_name=common_name)
        context = ssl.create_default_context(cafile=str(directory / names.CA_FILE))
        context.load_cert_chain(directory / names.CERT_FILE, directory / names.KEY_FILE)
        return context

    def server_context(self, directory: Path, *, server_name: str) -> ssl.SSLContext:
        """Return the context of a server with that name; `directory` keeps the files, the
        authority's certificate among them.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self._write(directory, common_name=server_name, server_names=(server_name,))
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(directory / names.CERT_FILE, directory / names.KEY_FILE)
        return context

    def _write(self, directory: Path, *, common_name: str, server_names: tuple[str, ...] = ()) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(common_name, key, server_names=server_names)
        (directory / names.CA_FILE).write_bytes(self.certificate.public_bytes(serialization.Encoding.PEM))
        (directory / names.CERT_FILE).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        (directory / names.KEY_FILE).write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )

    def _sign(
        self,
        common_name: str,
        key: ec.EllipticCurvePrivateKey,
        *,
        server_names: tuple[str, ...] = (),
        authority: bool = False,
    ) -> x509.Certificate:
        now = datetime.now(UTC)
        issuer_key_id = x509.SubjectKeyIdentifier.from_public_key(self.key.public_key())
        usage = x509.KeyUsage(not authority, False, False, False, False, authority, authority, False, False)
        builder = (
            x509.CertificateBuilder()
            .subject_name(_name(common_name))
            .issuer_name(_name("test authority"))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - CLOCK_TOLERANCE)
            .not_valid_after(now + self.life)
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer_key_id), critical=False
            )
            .add_extension(usage, critical=True)
        )
        if server_names:
            alternative = x509.SubjectAlternativeName([x509.DNSName(name) for name in server_names])
            builder = builder.add_extension(alternative, critical=False)
        return builder.sign(self.key, hashes.SHA256())
