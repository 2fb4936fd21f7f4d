"""Secrets of authorities as cert-manager makes them for a Certificate with isCA, by an Issuer of kind selfSigned."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from colocated_rl_api import names
from colocated_rl_operator.clients.authority import Authority

PKCS8 = serialization.PrivateFormat.PKCS8


def issued_files(
    *, issuer: Authority | None = None, is_ca: bool = True, form: serialization.PrivateFormat = PKCS8
) -> dict[str, bytes]:
    """Return tls.crt, tls.key and ca.crt of a new key. issuer: the authority that signs it in its own place."""
    key = ec.generate_private_key(ec.SECP256R1())
    public = key.public_key()
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "colocated-rl authority")])
    point = public.public_bytes(serialization.Encoding.X962, serialization.PublicFormat.UncompressedPoint)
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(name, name, public, x509.random_serial_number())
        .not_valid_before(now)
        .not_valid_after(now + timedelta(days=365))
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        .add_extension(x509.KeyUsage(False, False, False, False, False, is_ca, is_ca, False, False), critical=True)
        .add_extension(x509.SubjectKeyIdentifier(hashlib.sha256(point).digest()[:20]), critical=False)  # as Go does
        .sign(key if issuer is None else issuer.key, hashes.SHA256())
    )
    of_issuer = certificate if issuer is None else issuer.certificate
    return {
        names.CERT_FILE: certificate.public_bytes(serialization.Encoding.PEM),
        names.KEY_FILE: key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()),
        names.CA_FILE: of_issuer.public_bytes(serialization.Encoding.PEM),
    }
