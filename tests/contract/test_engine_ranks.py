"""The check of new weights against the real engine with two ranks that divide the model (tensor parallelism).

Query, key and value are one parameter in the engine, and gate and up projection another, each divided by rows; the
vocabulary is padded, and the other matrices are divided by columns.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from colocated_rl_agent.drivers.sglang import SGLang
from colocated_rl_agent.files.exports import read_tensor_file, verify_export
from colocated_rl_agent.lanes.probe import ProbeDisagrees, require_agreement
from colocated_rl_agent.lanes.update_check import Checksums, UpdateDoubted, require_changes
from colocated_rl_api.rungs import WeightVersion
from engines import engine_process, paused_engine
from fakes.engine_model import LAYERS, write_engine_export

pytestmark = pytest.mark.slow

OLD, NEW = WeightVersion(0, 1), WeightVersion(1, 1)
RANKS = 2
CALL_S = 120.0
FLAGS = ("--tp-size", str(RANKS), "--max-total-tokens", "4096", "--max-running-requests", "2")
ONE_CORE_EACH = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(["0"] * RANKS), "SGLANG_NCCL_SO_PATH": "/dev/null"}
FILE = "model.safetensors"
PARAMETERS = 1 + 1 + LAYERS * 8  # embedding, last norm; four norms and four matrices a layer
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exports of two versions, all of whose tensors differ: norms of new models are the same ones."""
    root = tmp_path_factory.mktemp("exports")
    for version in (OLD, NEW):
        write_engine_export(root / str(version), version=version, seed=version.step, norms=1.0 + version.step)
    return root


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, exports: Path) -> Iterator[str]:
    root = tmp_path_factory.mktemp("engine")
    with engine_process(exports / str(OLD), version=OLD, root=root, flags=FLAGS, variables=ONE_CORE_EACH) as engine:
        engine.wait_until_up()
        yield engine.url


@pytest.fixture
async def engine(url: str, exports: Path) -> AsyncIterator[SGLang]:
    """It is paused and holds the old version."""
    async with paused_engine(url, exports / str(OLD), OLD, call_s=CALL_S) as paused:
        yield paused


def judge(exports: Path, held: Checksums, found: Checksums) -> int:
    """Judge an update as the agent does, and return how many parameters were judged. Raises UpdateDoubted."""
    old, new = (read_tensor_file(exports / str(each) / FILE, ranks=RANKS).digests for each in (OLD, NEW))
    return require_changes(old, new, held, found, before=None, dtype="float32")


async def updated(engine: SGLang, loads: Path) -> tuple[Checksums, Checksums]:
    """Update to what passes for the new version, and return what the engine held and holds."""
    _, held = await engine.checksum()
    await engine.update(loads, NEW)
    _, found = await engine.checksum()
    return held, found


def wrong_export(exports: Path, directory: Path, **changed: torch.Tensor) -> Path:
    shutil.copytree(exports / str(NEW), directory)
    save_file(load_file(directory / FILE) | changed, directory / FILE, metadata={"format": "pt"})
    return directory


async def test_a_right_update_of_two_ranks_is_accepted_and_all_they_hold_is_judged(
    engine: SGLang, exports: Path
) -> None:
    held, found = await updated(engine, exports / str(NEW))
    assert {RANKS} == {len(each) for each in found.values()}
    assert PARAMETERS == len(found)
    assert PARAMETERS == judge(exports, held, found)

    await engine.flush()
    await engine.continue_()
    right, former = (verify_export(exports, each)[0].probe for each in (NEW, OLD))
    assert right is not None
    assert former is not None
    answered = await engine.input_logprobs(right.input_ids)
    assert require_agreement(right.logp, answered, noise_nats=None, is_exact=True) < 1e-4
    with pytest.raises(ProbeDisagrees):
        require_agreement(former.logp, answered, noise_nats=1e-6, is_exact=True)
    await engine.pause()


async def test_weights_of_the_version_before_are_found(engine: SGLang, exports: Path) -> None:
    held, found = await updated(engine, exports / str(OLD))
    with pytest.raises(UpdateDoubted, match=f"{PARAMETERS} of {PARAMETERS} .* did not change as the exported"):
        judge(exports, held, found)


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("name", [DOWN, "model.layers.0.mlp.down_proj.weight"])
async def test_the_part_of_one_rank_that_is_of_the_version_before_is_found(
    engine: SGLang, exports: Path, tmp_path: Path, rank: int, name: str
) -> None:
    """The other rank's part is right, and both ranks report success."""
    old, new = (load_file(exports / str(each) / FILE)[name] for each in (OLD, NEW))
    share = new.shape[1] // RANKS
    new[:, rank * share : (rank + 1) * share] = old[:, rank * share : (rank + 1) * share]
    held, found = await updated(engine, wrong_export(exports, tmp_path / "wrong", **{name: new}))
    assert held[name][rank] == found[name][rank]
    with pytest.raises(UpdateDoubted, match=f"1 of {PARAMETERS} .* first {name}"):
        judge(exports, held, found)
