"""The check of new weights against the real engine, on a trained public model in bfloat16: SmolLM2-135M-Instruct.

The step between the two versions is as small as one of AdamW at a learning rate of 1e-6, so most of its elements stay
the same in bfloat16.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from colocated_rl_agent.drivers.sglang import SGLang
from colocated_rl_agent.files.exports import read_tensor_file
from colocated_rl_agent.lanes.probe import ProbeDisagrees, require_agreement
from colocated_rl_agent.lanes.update_check import Checksums, UpdateDoubted, require_changes
from colocated_rl_api.rungs import WeightVersion
from colocated_rl_api.weights import Probe
from colocated_rl_trainer.state.weights import load_model, probe
from engines import engine_process, paused_engine
from setup.layout import CHECKOUT

pytestmark = pytest.mark.slow

OLD, NEW = WeightVersion(0, 1), WeightVersion(1, 1)
STEP = 1e-6
CALL_S = 120.0
FLAGS = ("--dtype", "bfloat16", "--max-total-tokens", "2048", "--context-length", "512")
FILE = "model.safetensors"
KEPT = "model.layers.3.mlp.up_proj.weight"  # the engine has it in a fused parameter

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class TwoVersions:
    """Directories with the model before and after a step, and one more for what is wrong."""

    old: Path
    new: Path
    wrong: Path

    def make_wrong(self, **changed: torch.Tensor | None) -> Path:
        """The new version with other tensors; None: left out."""
        tensors: dict[str, torch.Tensor | None] = {**load_file(self.new / FILE), **changed}
        kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        save_file(kept, self.wrong / FILE, metadata={"format": "pt"})
        return self.wrong


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> TwoVersions:
    root = tmp_path_factory.mktemp("versions")
    for name in ("new", "wrong"):
        shutil.copytree(CHECKOUT.trained_model, root / name, ignore=shutil.ignore_patterns("*.safetensors"))
    made, generator = {}, torch.Generator().manual_seed(1)
    for name, tensor in load_file(CHECKOUT.trained_model / FILE).items():
        signs = torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1
        made[name] = (tensor.float() + STEP * signs).to(torch.bfloat16)
    save_file(made, root / "new" / FILE, metadata={"format": "pt"})
    return TwoVersions(CHECKOUT.trained_model, root / "new", root / "wrong")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, versions: TwoVersions) -> Iterator[str]:
    root = tmp_path_factory.mktemp("engine")
    with engine_process(versions.old, version=OLD, root=root, flags=FLAGS) as engine:
        engine.wait_until_up()
        yield engine.url


@pytest.fixture
async def engine(url: str, versions: TwoVersions) -> AsyncIterator[SGLang]:
    """It is paused and holds the old version."""
    async with paused_engine(url, versions.old, OLD, call_s=CALL_S) as paused:
        yield paused


async def judge(engine: SGLang, versions: TwoVersions, *, loads: Path) -> tuple[int, Checksums]:
    """Update to what was exported as the new version, or so the engine says. How many parameters were judged."""
    _, held = await engine.checksum()
    await engine.update(loads, NEW)
    _, found = await engine.checksum()
    dtype = (await engine.require_suitable(memory_saver=False, gpus=0)).dtype
    old, new = (read_tensor_file(each / FILE).digests for each in (versions.old, versions.new))
    return require_changes(old, new, held, found, before=None, dtype=dtype), found


async def test_every_parameter_of_the_engine_is_judged_and_a_right_update_is_accepted(
    engine: SGLang, versions: TwoVersions
) -> None:
    judged, found = await judge(engine, versions, loads=versions.new)
    layers = 30
    assert 1 + 1 + 6 * layers == judged == len(found), "embedding, last norm; two norms and four matrices a layer"


async def test_an_update_that_changed_nothing_is_found(engine: SGLang, versions: TwoVersions) -> None:
    with pytest.raises(UpdateDoubted, match="did not change as the exported tensors did"):
        await judge(engine, versions, loads=versions.old)


async def test_a_tensor_that_an_update_lacked_is_found(engine: SGLang, versions: TwoVersions) -> None:
    """Both parts of a fused parameter: with one of them, the other one's change would hide it."""
    up, gate = KEPT, KEPT.replace("up_proj", "gate_proj")
    with pytest.raises(UpdateDoubted, match=r"1 of 182 .* first model\.layers\.3\.mlp\.gate_up_proj\.weight"):
        await judge(engine, versions, loads=versions.make_wrong(**{up: None, gate: None}))


async def test_tensors_of_the_version_before_are_found(engine: SGLang, versions: TwoVersions) -> None:
    """They would be there if a shard had not been replaced."""
    old = load_file(versions.old / FILE)
    shard = {name: old[name] for name in old if name.startswith("model.layers.7.")}
    with pytest.raises(UpdateDoubted, match=r"first model\.layers\.7\."):
        await judge(engine, versions, loads=versions.make_wrong(**shard))


async def test_an_update_writes_every_tensor_as_the_engines_load_does(engine: SGLang, versions: TwoVersions) -> None:
    """Therefore a parameter that an update left out, or stored in place of another, can't pass for a loaded one."""
    _, loaded = await engine.checksum()
    await engine._call("POST", "/weights_checker", {"action": "reset_tensors"})
    _, reset = await engine.checksum()
    assert set() == {name for name in loaded if reset[name] == loaded[name]}, "nothing is left of the load"
    await engine.update(versions.old, OLD)
    assert loaded == (await engine.checksum())[1]


# ----------------------------------------------------------------------------------------------------------- the probe
async def apart(engine: SGLang, loads: Path, exported: Path, noise_nats: float | None) -> float:
    """Update the engine and return how far it is from the trainer's log-probabilities of `exported`, if it agrees."""
    await engine.update(loads, NEW)
    await engine.flush()
    await engine.continue_()
    right = await asyncio.to_thread(probe_of, exported)
    found = await engine.input_logprobs(right.input_ids)
    await engine.pause()
    return require_agreement(right.logp, found, noise_nats=noise_nats, is_exact=False)


def probe_of(directory: Path) -> Probe:
    """Return the probe that a trainer in bfloat16 writes with these weights."""
    return probe(load_model(directory), torch.bfloat16)


def step_from(versions: TwoVersions, seed: int) -> None:
    """Make `new` another version: steps of any size from one that changes few bits to one that changes the model."""
    generator = torch.Generator().manual_seed(seed)
    size = float(10 ** (-6 + 3 * torch.rand((), generator=generator)))
    made = {}
    for name, tensor in load_file(versions.old / FILE).items():
        signs = torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1
        made[name] = (tensor.float() + size * signs).to(torch.bfloat16)
    save_file(made, versions.new / FILE, metadata={"format": "pt"})


async def test_an_engine_with_two_layers_exchanged_is_found_by_what_it_computes(
    engine: SGLang, versions: TwoVersions, record_property: Callable[[str, object], None]
) -> None:
    """Each element changed by a hundredth, so each checksum changed, as those of a right update do."""
    generator = torch.Generator().manual_seed(1)
    made = {}
    for name, tensor in load_file(versions.old / FILE).items():
        signs = torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1
        made[name] = (tensor.float() * (1 + 0.01 * signs)).to(torch.bfloat16)
    save_file(made, versions.new / FILE, metadata={"format": "pt"})
    noise = await apart(engine, versions.old, versions.old, None)
    right = await apart(engine, versions.new, versions.new, noise)
    new = load_file(versions.new / FILE)
    for one, other in ((0, 1), (9, 10), (28, 29)):
        first, second = f"model.layers.{one}.", f"model.layers.{other}."
        exchanged = {name.replace(first, second): new[name] for name in new if name.startswith(first)}
        exchanged |= {name.replace(second, first): new[name] for name in new if name.startswith(second)}
        loads = versions.make_wrong(**exchanged)
        await engine.update(versions.old, OLD)
        await judge(engine, versions, loads=loads)
        with pytest.raises(ProbeDisagrees):
            await apart(engine, loads, versions.new, right)
    record_property("nats", (noise, right))


async def test_no_version_of_a_trained_model_is_taken_for_another(
    engine: SGLang, versions: TwoVersions, record_property: Callable[[str, object], None]
) -> None:
    """COLOCATED_RL_SEEDS is the number of versions, each with a probe of its own that the engine has to agree with."""
    noise = await apart(engine, versions.old, versions.old, None)
    found = []
    for seed in range(int(os.environ.get("COLOCATED_RL_SEEDS", "5"))):
        step_from(versions, seed)
        noise = await apart(engine, versions.new, versions.new, noise)
        found.append(noise)
    record_property("nats", (min(found), max(found)))
    record_property("next", max(later / former for former, later in itertools.pairwise(found)))
