"""States what a release was made of, signs that with a key, and compares a release with what was signed.

    python -m release describe DIRECTORY --builder URI
    python -m release sign DIRECTORY --key PRIVATE.pem
    python -m release verify DIRECTORY --key PUBLIC.pem

The description is an in-toto statement with SLSA provenance 1.0: each file of the release by its hash, the commit, and
the files that pin what went into it. The signature is a DSSE envelope around it. Nothing here needs a network or a log
of others: who verifies has to have the public key from somewhere that can be trusted.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key
from google.protobuf import json_format
from google.protobuf.struct_pb2 import Struct
from in_toto_attestation.predicates.provenance.v1.provenance_pb2 import (
    BuildDefinition,
    Builder,
    Provenance,
    RunDetails,
)
from in_toto_attestation.v1.resource_descriptor import ResourceDescriptor
from in_toto_attestation.v1.statement import Statement
from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import Error
from securesystemslib.signer import CryptoSigner, SSlibKey

ROOT = Path(__file__).resolve().parents[2]
STATEMENT, ENVELOPE = "provenance.json", "provenance.intoto.jsonl"
PAYLOAD = "application/vnd.in-toto+json"
PREDICATE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "https://rl.colocate.dev/make-dist/v1"


class NotAsSigned(Exception):
    """The release is not what somebody with this key has signed."""


def files_of(directory: Path) -> dict[str, str]:
    """Return name and SHA-256 of each file but for the statement itself. Raises NotAsSigned."""
    found = {}
    for path in sorted(directory.iterdir()):
        if path.is_symlink() or not path.is_file():
            raise NotAsSigned(f"{path.name} is no file")
        if path.name not in (STATEMENT, ENVELOPE):
            with path.open("rb") as file:
                found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def describe(directory: Path, builder: str) -> str:
    """Return the statement about a directory that was made of this checkout, as JSON."""
    parameters = Struct()
    parameters.update({"target": "dist"})
    pinned = [
        ResourceDescriptor(name=name, digest={"sha256": hashlib.sha256((ROOT / name).read_bytes()).hexdigest()}).pb
        for name in _git("ls-files", "operator/*.txt", "workloads/*.txt").split()
    ]
    provenance = Provenance(
        build_definition=BuildDefinition(
            build_type=BUILD_TYPE, external_parameters=parameters, resolved_dependencies=[*_source(), *pinned]
        ),
        run_details=RunDetails(builder=Builder(id=builder)),
    )
    subjects = [ResourceDescriptor(name=name, digest={"sha256": sha}).pb for name, sha in files_of(directory).items()]
    statement = Statement(subjects, PREDICATE, json_format.MessageToDict(provenance))
    statement.validate()
    return str(json_format.MessageToJson(statement.pb, indent=1, sort_keys=True)) + "\n"


def sign(statement: bytes, key: bytes) -> str:
    """Return the envelope, one line of JSON. Raises ValueError.

    key: PEM, of Ed25519, ECDSA or RSA, without a passphrase.
    """
    envelope = Envelope(statement, PAYLOAD, {})
    envelope.sign(CryptoSigner(load_pem_private_key(key, password=None)))
    return json.dumps(envelope.to_dict()) + "\n"


def verify(directory: Path, key: bytes) -> str:
    """Return the commit that the release was made of, or "" where its sources were no commit's. Raises NotAsSigned."""
    try:
        envelope = Envelope.from_dict(json.loads((directory / ENVELOPE).read_text()))
        envelope.verify([SSlibKey.from_crypto(load_pem_public_key(key))], 1)
        if envelope.payload_type != PAYLOAD:
            raise NotAsSigned(f"{ENVELOPE} is signed as {envelope.payload_type}")
        statement = json.loads(envelope.payload)
        signed = {subject["name"]: subject["digest"]["sha256"] for subject in statement["subject"]}
        sources = statement["predicate"]["buildDefinition"]["resolvedDependencies"]
        commits = [each["digest"].get("gitCommit", "") for each in sources]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, Error, UnsupportedAlgorithm) as error:
        raise NotAsSigned(f"{ENVELOPE}: {type(error).__name__}: {error}") from error
    found = files_of(directory)
    if others := sorted(name for name in signed.keys() | found.keys() if signed.get(name) != found.get(name)):
        raise NotAsSigned(f"not as signed: {', '.join(others)}")
    return next(filter(None, commits), "")


def _source() -> list[object]:
    """Name the commit, unless the checkout has changes that no commit has."""
    if _git("status", "--porcelain"):
        return []
    return [ResourceDescriptor(name="source", digest={"gitCommit": _git("rev-parse", "HEAD").strip()}).pb]


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def main() -> int:
    parser = argparse.ArgumentParser(prog="release", description=__doc__)
    parser.add_argument("what", choices=["describe", "sign", "verify"])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--builder", default="", metavar="URI", help="who makes it")
    parser.add_argument("--key", type=Path, help="a file in PEM")
    options = parser.parse_args()
    directory = options.directory
    try:
        match options.what:
            case "describe":
                (directory / STATEMENT).write_text(describe(directory, options.builder))
            case "sign":
                signed = sign((directory / STATEMENT).read_bytes(), options.key.read_bytes())
                (directory / ENVELOPE).write_text(signed)
            case _:
                commit = verify(directory, options.key.read_bytes())
                print(f"as signed; made of {commit or 'sources that no commit has'}")  # noqa: T201
    except (NotAsSigned, OSError, ValueError) as error:
        print(f"release: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
