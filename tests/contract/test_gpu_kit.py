"""A kit for a machine without a network: packed, carried in pieces, unpacked by a fresh Python that has torch alone.

The machine's Python is a new virtual environment with those libraries that `THERE` names, and nothing else. To make,
carry and unpack it takes minutes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from bench.gpu.check import choices, pins
from bench.gpu.kit import THERE, make_kit, needed
from bench.gpu.unpack import SUMS
from setup.layout import CHECKOUT

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
PIECE_BYTES = 3 * 2**20
ENOUGH_S = 300


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For this Python. The memory saver, which is not in the tests' environments, stays out: it is for a GPU."""
    out = tmp_path_factory.mktemp("kit")
    pieces = make_kit(out, python=PYTHON, libraries=list(needed(PYTHON)), piece_bytes=PIECE_BYTES)
    assert len(pieces) > 2
    assert all(piece.stat().st_size <= PIECE_BYTES for piece in pieces)
    return out


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its python3."""
    folder = tmp_path_factory.mktemp("machine")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True)
    (site,) = (folder / "env/lib").glob("python*/site-packages")
    for name in libraries_there():
        for file in {Path(str(path)).parts[0] for path in distribution(name).files or ()} - {"..", "__pycache__"}:
            if not (site / file).exists():
                (site / file).symlink_to(str(distribution(name).locate_file(file)))
    return folder / "env/bin/python3"


def libraries_there() -> Iterator[str]:
    """Yield what the kit expects there, and what that needs."""
    names, known = list(THERE), set[str]()
    while names:
        name = canonicalize_name(names.pop())
        if name not in known:
            known.add(name)
            yield name
            wanted = map(Requirement, distribution(name).requires or ())
            names += [each.name for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})]


def run(command: list[str | Path], *, python: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command as on that machine: its python3 comes first, and nothing says where this checkout is."""
    environment = {
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "HOME": str(cwd),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",  # a GPU that this machine may have is not that one's
    }
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=ENOUGH_S, check=False
    )


@pytest.fixture(scope="module")
def unpacked(kit: Path, machine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    into = tmp_path_factory.mktemp("there") / "kit"
    done = run([machine, kit / "unpack.py", into], python=machine, cwd=into.parent)
    assert 0 == done.returncode, done.stderr
    return into


@pytest.mark.release
def test_torn_or_forgotten_piece_is_named_and_nothing_is_unpacked(kit: Path, machine: Path, tmp_path: Path) -> None:
    carried = tmp_path / "carried"
    carried.mkdir()
    for file in kit.iterdir():
        (carried / file.name).write_bytes(file.read_bytes())
    last = max(carried.glob("kit.*"))
    whole = last.read_bytes()
    for torn in (whole[:-1], bytes([whole[0] ^ 1]) + whole[1:], None):
        last.unlink(missing_ok=True)
        if torn is not None:
            last.write_bytes(torn)
        done = run([machine, carried / "unpack.py", tmp_path / "there"], python=machine, cwd=tmp_path)
        assert (1, "") == (done.returncode, done.stdout)
        assert done.stderr.startswith(f"nothing unpacked: {last.name} is not ")
        assert not (tmp_path / "there").exists()


@pytest.mark.release
def test_sums_are_such_as_other_tools_read(kit: Path) -> None:
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", SUMS], cwd=kit, check=True)


@pytest.mark.release
def test_unpacked_kit_is_the_working_tree_and_says_what_the_machine_has(unpacked: Path, machine: Path) -> None:
    done = run([unpacked / "run", "check", "--device", "cpu"], python=machine, cwd=unpacked)

    assert (0, "") == (done.returncode, done.stderr)
    assert "prove-gpu: without SGLang, with the engine of the tests" in done.stdout
    assert "there is no torch_memory_saver" in done.stdout
    for name in ("bench/gpu/kit.py", "Makefile", "docs/measurements.md"):
        assert (CHECKOUT.root / name).read_bytes() == (unpacked / "tree" / name).read_bytes()


@pytest.mark.release
def test_machine_without_a_gpu_is_told_what_it_lacks(unpacked: Path, machine: Path) -> None:
    done = run([unpacked / "run", "check"], python=machine, cwd=unpacked)

    assert 1 == done.returncode
    assert "LACKS an NVIDIA GPU that torch finds" in done.stdout


@pytest.mark.release
def test_unpacked_kit_needs_nothing_else(unpacked: Path, machine: Path) -> None:
    """Tests for a GPU are collected, which imports all that they use; switches are made on a CPU."""
    for words in (
        ["test-gpu", "--collect-only", "-q"],
        ["prove-gpu", "--device", "cpu", "--model", "tiny", "--switches", "5"],
    ):
        done = run([unpacked / "run", *words], python=machine, cwd=unpacked)
        assert 0 == done.returncode, done.stdout + done.stderr
    assert "| falls short | of nothing |" in done.stdout


def test_real_sglang_is_chosen_where_it_is() -> None:
    assert ["prove-gpu: with SGLang"] == list(choices("cuda", has_sglang=True))[:1]
    assert "with the engine of the tests" in next(choices("cpu", has_sglang=True)), "it needs a GPU here"


def test_pins_are_read_from_the_requirements() -> None:
    pinned = pins((CHECKOUT.root / "tests/requirements.txt").read_text())
    assert (distribution("torch").version.partition("+")[0], distribution("pytest").version) == (
        pinned["torch"],
        pinned["pytest"],
    )
