"""These tests describe and sign what `make dist` makes, and refuse what is not as it was signed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from setup.layout import CHECKOUT

pytestmark = [pytest.mark.cluster, pytest.mark.slow]  # Helm is the local cluster's

TESTS = CHECKOUT.root / "tests"
RELEASE_S = 300.0
WHEEL = "colocated_rl_agent-*.whl"


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHONPATH": str(TESTS)}
    return subprocess.run(
        [str(word) for word in words], env=variables, capture_output=True, text=True, timeout=RELEASE_S, check=False
    )


def release(*words: str | Path) -> subprocess.CompletedProcess[str]:
    requirements = TESTS / "release/requirements.txt"
    tool = (CHECKOUT.uv, "run", "--quiet", "--no-project", "--with-requirements", requirements)
    return run(*tool, "python", "-m", "release", *words)


def write_keys(directory: Path, name: str) -> tuple[Path, Path]:
    key: EllipticCurvePrivateKey = generate_private_key(SECP256R1())
    private, public = directory / f"{name}.pem", directory / f"{name}.pub"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return private, public


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("keys")
    for name in ("ours", "another"):
        write_keys(directory, name)
    return directory


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory, keys: Path) -> Path:
    directory = tmp_path_factory.mktemp("release") / "dist"
    cluster = CHECKOUT.build / "bin/localcluster"
    made = run(TESTS / "release/dist.sh", CHECKOUT.uv, cluster, directory, "https://builder.example/1")
    assert 0 == made.returncode, made.stderr
    signed = release("sign", directory, "--key", keys / "ours.pem")
    assert 0 == signed.returncode, signed.stderr
    return directory


def test_release_is_described_by_all_of_its_files_and_what_they_are_made_of(dist: Path, keys: Path) -> None:
    statement = json.loads((dist / "provenance.json").read_text())
    assert ("https://in-toto.io/Statement/v1", "https://slsa.dev/provenance/v1") == (
        statement["_type"],
        statement["predicateType"],
    )
    named = {each["name"]: each["digest"]["sha256"] for each in statement["subject"]}
    own = {"provenance.json", "provenance.intoto.jsonl"}
    assert named == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in dist.iterdir() if path.name not in own
    }
    assert {"SHA256SUMS", "colocated-rl.yaml", "operator.cdx.json", "gpu-cpu.cdx.json"} < named.keys()
    predicate = statement["predicate"]
    assert "https://builder.example/1" == predicate["runDetails"]["builder"]["id"]
    pinned = {each["name"] for each in predicate["buildDefinition"]["resolvedDependencies"]}
    assert {"operator/requirements.txt", "workloads/gpu/engine.txt", "workloads/images/tools.txt"} <= pinned
    assert "as signed; made of " in release("verify", dist, "--key", keys / "ours.pub").stdout


@pytest.mark.parametrize("image", ["operator", "agent", "rollout", "gpu-cpu"])
def test_each_image_has_a_bill_of_its_libraries_with_the_hashes_that_are_installed(dist: Path, image: str) -> None:
    bill = json.loads((dist / f"{image}.cdx.json").read_text())
    assert "CycloneDX" == bill["bomFormat"]
    found = {component["name"].lower(): component for component in bill["components"]}
    assert {"pydantic"} < found.keys()
    assert ("sglang" in found) is (image == "gpu-cpu")
    hashes = [
        found["pydantic"]["version"],
        *(each["content"] for reference in found["pydantic"]["externalReferences"] for each in reference["hashes"]),
    ]
    pinned = (CHECKOUT.root / "tests/requirements.txt").read_text()
    assert all(each in pinned for each in hashes)
    assert 2 <= len(hashes)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def reseal(directory: Path) -> None:
    """Put the hash of a changed file into what was signed, and leave the signature."""
    path = directory / "provenance.intoto.jsonl"
    envelope = json.loads(path.read_text())
    payload = bytearray(envelope["payload"], "ascii")
    payload[400] = ord("A") if payload[400] != ord("A") else ord("B")
    path.write_text(json.dumps({**envelope, "payload": payload.decode()}))


@pytest.mark.parametrize(
    ("change", "key", "message"),
    [
        (lambda place: flip(next(place.glob(WHEEL))), "ours", "not as signed: colocated_rl_agent-"),
        (lambda place: flip(place / "SHA256SUMS"), "ours", "not as signed: SHA256SUMS"),
        (lambda place: (place / "one-more.whl").write_text(""), "ours", "not as signed: one-more.whl"),
        (lambda place: next(place.glob(WHEEL)).unlink(), "ours", "not as signed: colocated_rl_agent-"),
        (reseal, "ours", "provenance.intoto.jsonl: "),
        (lambda place: (place / "provenance.intoto.jsonl").unlink(), "ours", "provenance.intoto.jsonl: "),
        (lambda place: None, "another", "provenance.intoto.jsonl: VerificationError"),
    ],
    ids=["file", "hashes", "one more", "one less", "statement", "no signature", "another key"],
)
def test_what_is_not_as_it_was_signed_is_refused(
    dist: Path, keys: Path, tmp_path: Path, change: Callable[[Path], object], key: str, message: str
) -> None:
    place = tmp_path / "dist"
    shutil.copytree(dist, place)
    change(place)
    verified = release("verify", place, "--key", keys / f"{key}.pub")
    assert (1, "") == (verified.returncode, verified.stdout)
    assert message in verified.stderr
