"""LoRA: what is trained, exported and saved are adapters as peft has them, beside a model that never changes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from contract.peer import run_peer
from contract.test_trainer_weights import SMALL
from contract.trainer_in_process import RankInProcess
from contract.trainer_ranks_in_process import UnwatchedTrainer, in_ranks
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, FalconConfig, PhimoeConfig, PreTrainedConfig, Qwen2Config

from bench.sizes import FILLED, MEMORY, TOKENS
from colocated_rl_api.rungs import WeightVersion
from colocated_rl_api.weights import finished_model
from colocated_rl_trainer.conformance.shards import Example, write_shards
from colocated_rl_trainer.grpo.budget import Budget, gib
from colocated_rl_trainer.protocol.finished import save_final_model
from colocated_rl_trainer.protocol.manifest import Exported, write_manifest
from colocated_rl_trainer.protocol.settings import ConfigError, LoraConfig
from colocated_rl_trainer.state.export import ADAPTERS
from colocated_rl_trainer.state.lora import A, B
from colocated_rl_trainer.state.rehearsal import Pass, pass_bytes
from colocated_rl_trainer.state.residency import GRADIENTS, PARAMETERS, Residency
from colocated_rl_trainer.state.weights import count_parameters, load_model
from fakes.tiny_model import write_tiny_model
from setup.layout import CHECKOUT

CAP = 1.5
PREFIX = "base_model.model."
LORA: dict[str, object] = {"rank": 4, "alpha": 6}
CONFIG: dict[str, object] = {
    "lora": LORA, "learningRate": 0.05, "gradientClip": 1e9, "importanceCap": CAP, "advantage": "Mean",
    "microBatchTokens": 40,
}  # fmt: skip


def samples(step: int) -> list[Example]:
    """Twelve of three prompts; rewards differ within a group."""
    random = torch.Generator().manual_seed(step)
    made = []
    for number in range(12):
        response = torch.randint(2, 48, (5 + number % 4,), generator=random).tolist()
        logp = (-3.0 - torch.rand(len(response), generator=random)).tolist()
        made.append(Example([2 + number % 3, 9, 4], response, logp, float(number % 5), number % 3, step - 1))
    return made


def exported(trainer: RankInProcess, folder: Path) -> Path:
    folder.mkdir()
    trainer.loop.export(folder)
    return folder


def ask_peft(folder: Path, model: Path, adapter: Path, batch: Sequence[Example], **more: object) -> dict[str, Tensor]:
    """Return what peft computes: see `peers/peft_step.py`."""
    folder.mkdir(exist_ok=True)
    described = [
        {
            "prompt": each.prompt,
            "response": each.response,
            "logp": each.logp,
            "reward": each.reward,
            "group": each.group,
        }
        for each in batch
    ]
    case = {"model": str(model), "adapter": str(adapter), "samples": described, "cap": CAP}
    (folder / "case.json").write_text(json.dumps(case | {"temperature": 1.0, "prompts": []} | more))
    run_peer("peft_step.py", folder)
    return load_file(folder / "peft.safetensors")


class LoraScene:
    """Two steps of the trainer, and what peft computes from where the second begins."""

    def __init__(self, folder: Path) -> None:
        self.model = write_tiny_model(folder / "model", tied=False)
        trainer = RankInProcess(folder, self.model, **CONFIG)
        trainer.train(samples(1))
        self.export = exported(trainer, folder / "export")
        self.adapters = trainer.gradients.keys()
        self.gradient: dict[str, Tensor] = {}
        trainer.at_update = lambda: self.gradient.update(trainer.gradients)
        trainer.train(samples(2))
        self.base = trainer.weights
        version, self.left = WeightVersion(1, 1), folder / finished_model(1)
        write_manifest(self.export, version, Exported())
        save_final_model(self.export, self.left, progress=lambda: None)
        self.theirs = ask_peft(folder / "peft", self.model, self.left / ADAPTERS, samples(2))

    def of_theirs(self, kind: str) -> dict[str, Tensor]:
        start = f"{kind}."
        return {name.removeprefix(start): each for name, each in self.theirs.items() if name.startswith(start)}


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> LoraScene:
    return LoraScene(tmp_path_factory.mktemp("lora"))


# ------------------------------------------------------------------------------------------------------ equal to peft's
def test_peft_reads_the_adapters_that_the_model_of_a_job_has_beside_its_weights(scene: LoraScene) -> None:
    written = load_file(scene.export / ADAPTERS / "adapter_model.safetensors")

    assert written.keys() == scene.of_theirs("read").keys()
    for name, tensor in scene.of_theirs("read").items():
        assert torch.equal(tensor, written[name]), name
    assert all(tensor.any() for tensor in written.values()), "after a step no adapter is zero"


def test_by_default_the_layers_of_peft_all_linear_are_adapted(scene: LoraScene) -> None:
    assert scene.of_theirs("new").keys() == scene.of_theirs("read").keys()


def test_exported_weights_are_those_that_peft_merges(scene: LoraScene) -> None:
    ours, theirs = load_file(scene.export / "model.safetensors"), scene.of_theirs("merged")
    begin = load_file(scene.model / "model.safetensors")

    assert theirs.keys() == ours.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-6)
        is_adapted = "proj" in name
        assert is_adapted != torch.equal(ours[name], begin[name]), name


def test_gradient_is_that_of_peft(scene: LoraScene) -> None:
    theirs = {name.removeprefix(PREFIX): each for name, each in scene.of_theirs("gradient").items()}

    assert theirs.keys() == scene.gradient.keys()
    for name, tensor in theirs.items():
        assert (scene.gradient[name] - tensor).norm() < 1e-5 * tensor.norm(), name


def test_only_adapters_are_trained(scene: LoraScene) -> None:
    begin = load_file(scene.model / "model.safetensors")

    assert all(name.endswith((f"{A}.weight", f"{B}.weight")) for name in scene.adapters)
    for name, tensor in begin.items():
        assert torch.equal(tensor, scene.base[name]), name


# ----------------------------------------------------------------------------------------------------------- more ranks
def train_two(trainer: UnwatchedTrainer) -> dict[str, dict[str, list[float]]]:
    """Gradient of the second step, the weights that are exported before it, and the state after it."""
    folder = trainer._settings.checkpoints.parent / f"rank-{trainer.rank}"
    (folder / "export").mkdir(parents=True)
    gradient: dict[str, list[float]] = {}
    for step in (1, 2):
        shard = write_shards(folder, samples(step), step=step, split=trainer._settings.world_size)[trainer.rank]
        if step == 2:
            trainer.export(folder / "export")
            trainer.mark_dirty = lambda: gradient.update(listed(trainer._state.named(GRADIENTS)))  # type: ignore[method-assign]
        trainer.train(step, shard, trainer)
    written = folder / "export" / "model.safetensors"
    return {
        "gradient": gradient,
        "export": listed(load_file(written)) if written.is_file() else {},
        "state": listed(trainer._state.saved()),
    }


def listed(tensors: Mapping[str, Tensor]) -> dict[str, list[float]]:
    return {name: tensor.float().flatten().tolist() for name, tensor in tensors.items()}


@pytest.mark.parametrize("state", ["Sharded", "Replicated"])
def test_two_ranks_compute_the_same_whether_they_share_the_frozen_weights_or_not(
    scene: LoraScene, tmp_path: Path, state: str
) -> None:
    first, second = in_ranks(2, tmp_path, scene.model, train_two, trainingState=state, **CONFIG)

    assert first["state"] == second["state"], "each rank has all adapters"
    assert first["gradient"].keys() == scene.gradient.keys()
    for name, expected in scene.gradient.items():
        found = torch.tensor(first["gradient"][name])
        assert (found - expected.flatten()).norm() < 1e-5 * expected.norm(), name
    for name, tensor in load_file(scene.export / "model.safetensors").items():
        torch.testing.assert_close(torch.tensor(first["export"][name]), tensor.flatten(), rtol=0, atol=1e-5)


def bytes_held(trainer: UnwatchedTrainer) -> tuple[int, int, set[torch.dtype], set[torch.dtype]]:
    """Bytes of the state on this rank and of its checkpoint; dtypes of frozen and of trained parameters."""
    train_two(trainer)
    parameters = [*trainer.model.parameters()]
    saved = sum(tensor.nbytes for tensor in trainer._state.saved().values())
    return (
        trainer._state.size_bytes,
        saved,
        {each.dtype for each in parameters if not each.requires_grad},
        {each.dtype for each in parameters if each.requires_grad},
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_rank_holds_its_part_of_frozen_weights_in_bfloat16_and_float32_state_of_adapters_alone(
    tmp_path: Path, ranks: int
) -> None:
    model = write_tiny_model(tmp_path / "model", hidden=64, layers=4)
    frozen = sum(tensor.numel() for tensor in load_file(model / "model.safetensors").values())
    adapters = sum(
        4 * (64 + other)
        for _ in range(4)
        for other in (64, 32, 32, 64, 128, 128, 128)  # rank times in plus out
    )

    for size, saved, base, trained in in_ranks(ranks, tmp_path, model, bytes_held, dtype="bfloat16", **CONFIG):
        assert 12 * adapters == saved, "parameters and two moments"
        assert 16 * adapters + 2 * frozen / ranks <= size < 16 * adapters + 2.1 * frozen / ranks
        assert ({torch.bfloat16}, {torch.float32}) == (base, trained)


# ------------------------------------------------------------------------------------------------------------- bfloat16
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_probe_is_that_of_the_exported_weights(tmp_path: Path, dtype: str) -> None:
    """Merged weights are rounded once more: with the adapters beside the weights a probe would not be the engine's."""
    model = write_tiny_model(tmp_path / "model")
    trainer = RankInProcess(tmp_path, model, dtype=dtype, **CONFIG)
    trainer.train(samples(1))
    (tmp_path / "export").mkdir()
    made = trainer.loop.export(tmp_path / "export")

    assert made is not None
    assert made.probe is not None
    served = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=getattr(torch, dtype))
    ids = torch.tensor([made.probe.input_ids])
    with torch.no_grad():
        logp = torch.log_softmax(served(ids).logits[0, :-1].float(), -1).gather(1, ids[0, 1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(made.probe.logp), logp, rtol=0, atol=1e-5)


def test_merging_rounds_the_sum_and_not_the_change(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    trainer = RankInProcess(tmp_path, model, dtype="bfloat16", **CONFIG)
    trainer.train(samples(1))
    export = exported(trainer, tmp_path / "export")
    begin, weights = load_file(model / "model.safetensors"), trainer.weights

    name = "model.layers.1.mlp.down_proj"
    change = 1.5 * weights[f"{name}.{B}.weight"] @ weights[f"{name}.{A}.weight"]
    expected = (begin[f"{name}.weight"].bfloat16().float() + change).bfloat16()
    assert torch.equal(expected, load_file(export / "model.safetensors")[f"{name}.weight"])


# ------------------------------------------------------------------------------------------------------------ reference
def test_the_reference_is_the_model_without_adapters_and_costs_no_memory(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    scores = {}
    for name, config in (("lora", CONFIG), ("all", {**CONFIG, "lora": None})):
        (tmp_path / name).mkdir()
        trainer = RankInProcess(tmp_path / name, model, has_reference=True, klCoefficient=0.1, **config)
        trainer.train(samples(1))
        metrics = trainer.train(samples(2))
        assert metrics["kl"] > 1e-3, "it is no longer the policy"
        assert trainer.loop._scored is not None
        scores[name] = trainer.loop._scored[1]
        assert (trainer.loop._state._reference is None) == (name == "lora")

    torch.testing.assert_close(scores["lora"], scores["all"], equal_nan=True)


# ---------------------------------------------------------------------------------------------------------- checkpoints
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_going_on_from_a_checkpoint_is_going_on(tmp_path: Path, dropout: float) -> None:
    model = write_tiny_model(tmp_path / "model")
    config = CONFIG | {"lora": LORA | {"dropout": dropout}}
    ends = []
    for name in ("straight", "resumed"):
        (tmp_path / name).mkdir()
        trainer = RankInProcess(tmp_path / name, model, **config)
        trainer.train(samples(1))
        trainer.save()
        if name == "resumed":
            trainer = RankInProcess(tmp_path / name, model, **config)
            assert 1 == trainer.step
        trainer.train(samples(2))
        ends.append(trainer.loop._state.saved())

    for name, tensor in ends[0].items():
        assert torch.equal(tensor, ends[1][name]), name


def test_dropout_drops_inputs_of_adapters_while_gradients_are_computed(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    gradients = {}
    for dropout in (0.0, 0.5):
        (tmp_path / str(dropout)).mkdir()
        trainer = RankInProcess(tmp_path / str(dropout), model, **CONFIG | {"lora": LORA | {"dropout": dropout}})
        seen: dict[str, Tensor] = {}
        trainer.at_update = lambda seen=seen, trainer=trainer: seen.update(trainer.gradients)  # type: ignore[misc]
        trainer.train(samples(1))
        gradients[dropout] = seen

    (name,) = [name for name in gradients[0.0] if name.endswith(f"layers.0.self_attn.v_proj.{B}.weight")]
    kept, dropped = gradients[0.0][name], gradients[0.5][name]
    assert 0.05 < (kept - dropped).norm() / kept.norm() < 5


def on_policy(trainer: RankInProcess, batch: Sequence[Example]) -> list[Example]:
    """Return the samples with the log-probabilities that the trainer's model gives their tokens."""
    made = []
    for each in batch:
        ids = torch.tensor([*each.prompt, *each.response])
        with torch.no_grad():
            logp = trainer.loop.model(input_ids=ids[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
        made.append(replace(each, logp=logp.gather(1, ids[1:, None])[len(each.prompt) - 1 :, 0].tolist()))
    return made


@pytest.mark.parametrize("options", [{"minibatches": 1}, {"minibatches": 2}, {"bypass": True}])
def test_dropout_is_in_neither_the_importance_ratio_nor_the_mismatch(tmp_path: Path, options: dict[str, Any]) -> None:
    config = CONFIG | {"importanceMask": "Token", "importanceMaskLow": 0.999, "importanceMaskHigh": 1.001}
    if bypasses := "bypass" in options:
        config = {"lora": LORA, "learningRate": 0.05}
    lora = LORA | {"dropout": 0.3}
    trainer = RankInProcess(tmp_path, write_tiny_model(tmp_path / "model"), **config | {"lora": lora} | options)
    trainer.train(samples(1))

    metrics = trainer.train(on_policy(trainer, samples(2)))

    if bypasses:
        assert "mismatch_mean" not in metrics, "no pass measured it"
    else:
        assert 1e-5 > metrics["mismatch_max"]
    assert 0.0 == metrics["importance_masked"]
    assert 1.0 == pytest.approx(metrics["importance_mean"], abs=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "other"}, "has adapters of another model than spec.model, 1 files differ, first model.safetensors"),
        ({"lora": {"rank": 8, "alpha": 6}}, "has adapters of rank 4 and alpha 6, and lora .* has 8 and 6"),
        ({"lora": {"rank": 4, "alpha": 3}}, "has adapters of rank 4 and alpha 6, and lora .* has 4 and 3"),
        ({"lora": None}, "is of another model or optimizer, .* optimizer and lora in spec.trainer.config, as they"),
        ({"lora": LORA | {"targetModules": ["q_proj"]}}, "is of another model or optimizer"),
    ],
)
def test_a_checkpoint_of_other_adapters_or_another_model_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    model = write_tiny_model(tmp_path / "model")
    trainer = RankInProcess(tmp_path, model, **CONFIG)
    trainer.train(samples(1))
    trainer.save()
    if changes.pop("model", None):
        tensors = load_file(model / "model.safetensors")
        tensors["model.norm.weight"][3] += 1e-3
        save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(ConfigError, match=message):
        RankInProcess(tmp_path, model, **CONFIG | changes)


def test_the_same_model_under_another_path_is_the_same(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    trainer = RankInProcess(tmp_path, model, **CONFIG)
    trainer.train(samples(1))
    trainer.save()
    shutil.copytree(model, tmp_path / "copy")
    (tmp_path / "copy" / "README.md").write_text("a model card")

    assert 1 == RankInProcess(tmp_path, tmp_path / "copy", **CONFIG).step


# --------------------------------------------------------------------------------------------------------------- layers
@pytest.mark.parametrize(
    ("targets", "named"),
    [
        (["q_proj", "v_proj"], ["q_proj", "v_proj"]),
        (["mlp.down_proj"], ["down_proj"]),
        (["layers.1.self_attn.o_proj"], ["model.layers.1.self_attn.o_proj"]),
    ],
)
def test_only_named_layers_are_adapted_and_peft_is_told_their_shortest_names(
    tmp_path: Path, targets: list[str], named: list[str]
) -> None:
    model = write_tiny_model(tmp_path / "model")
    trainer = RankInProcess(tmp_path, model, **CONFIG | {"lora": LORA | {"targetModules": targets}})
    export = exported(trainer, tmp_path / "export")

    adapted = {name.removesuffix(f".{A}.weight") for name in trainer.gradients if name.endswith(f".{A}.weight")}
    linear = [name.removesuffix(".weight") for name in trainer.weights if name.endswith("proj.weight")]
    assert {name for name in linear if name.endswith(tuple(targets))} == adapted
    assert named == json.loads((export / ADAPTERS / "adapter_config.json").read_bytes())["target_modules"]


@pytest.mark.parametrize("target", ["query", "proj", "embed_tokens", "lm_head", "model.layers"])
def test_a_name_that_no_linear_layer_has_is_refused_with_those_that_there_are(tmp_path: Path, target: str) -> None:
    model = write_tiny_model(tmp_path / "model", tied=False)

    with pytest.raises(ConfigError, match=rf"no linear layer is named {target}; there are: down_proj, .*, v_proj"):
        RankInProcess(tmp_path, model, **CONFIG | {"lora": LORA | {"targetModules": ["q_proj", target]}})


@pytest.mark.parametrize(
    ("config", "last"),
    [
        (PhimoeConfig(**SMALL, num_local_experts=4), "v_proj"),
        (FalconConfig(**SMALL, alibi=False), "query_key_value"),
    ],
    ids=["router of experts", "product of its own"],
)
def test_linear_layers_of_other_classes_are_adapted_where_they_compute_a_product_alone(
    tmp_path: Path, config: PreTrainedConfig, last: str
) -> None:
    """A router returns weights and experts beside its product: the first step ended in a TypeError."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    trainer = RankInProcess(tmp_path, tmp_path / "model", **CONFIG)
    trainer.train(samples(1))
    export = exported(trainer, tmp_path / "export")

    adapted = json.loads((export / ADAPTERS / "adapter_config.json").read_bytes())["target_modules"]
    assert last == adapted[-1]
    assert "router" not in adapted
    ids = torch.tensor([samples(1)[0].response])
    with torch.no_grad():
        served = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)(ids).logits
        torch.testing.assert_close(trainer.loop.model(input_ids=ids).logits, served, rtol=0, atol=1e-4)


# --------------------------------------------------------------------------------------------------------------- budget
def test_seven_billion_parameters_take_of_one_device_what_the_documentation_says(tmp_path: Path) -> None:
    shape = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
    config = Qwen2Config(vocab_size=152064, num_key_value_heads=4, tie_word_embeddings=False, **shape)
    config.save_pretrained(tmp_path)

    parameters, adapters, *_ = count_parameters(tmp_path, LoraConfig())
    with_adapters, with_all = (Budget.of(parameters, on_cpu=False, adapters=each) for each in (adapters, None))

    assert with_adapters.device is not None
    assert with_all.device is not None
    page = (CHECKOUT.root / "docs/sizing.md").read_text().replace("\n", " ")
    assert (
        f"one device holds {gib(with_adapters.device)} of this state while it trains, and of all weights "
        f"{gib(with_all.device)}. Off the device, {gib(with_adapters.host)} of it are in host memory." in page
    )
    one_pass = pass_bytes(config, Pass(TOKENS, torch.bfloat16, recomputes=True, lora=LoraConfig()))
    assert one_pass is not None
    whole = Budget.of(parameters, on_cpu=False, adapters=adapters, one_pass=one_pass)
    assert whole.device is not None
    assert f"With a pass of {TOKENS:,} tokens the device holds {gib(whole.device)} at its peak" in page
    whole.refuse_what_never_fits(device_has=int(FILLED * MEMORY["80 GB"] * 2**30), host_has=None)


# ---------------------------------------------------------------------------------------------------------------- moves
def test_frozen_weights_are_copied_to_the_device_and_never_back(tmp_path: Path) -> None:
    model = load_model(write_tiny_model(tmp_path / "model"), frozen=torch.bfloat16)
    begin = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model.lm_head.register_parameter("adapter", torch.nn.Parameter(torch.ones(3)))
    state = Residency(model, torch.device("cpu"), moves=True)
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]

    assert all(parameter.untyped_storage().size() == 0 for parameter in frozen)
    state.onload()
    for name, tensor in begin.items():
        assert torch.equal(tensor, model.get_parameter(name)), name
    frozen[0].data.fill_(7)  # what nobody may do would show
    state.offload()
    state.onload()
    assert torch.equal(begin["model.embed_tokens.weight"], frozen[0])
    assert {"parameters.lm_head.adapter", "first_moment.lm_head.adapter", "second_moment.lm_head.adapter"} == {
        *state.saved()
    }


def test_frozen_weights_stay_where_parameters_stay(tmp_path: Path) -> None:
    model = load_model(write_tiny_model(tmp_path / "model"), frozen=torch.float32)
    model.lm_head.register_parameter("adapter", torch.nn.Parameter(torch.ones(3)))
    state = Residency(model, torch.device("cpu"), moves=True, stays=[PARAMETERS])

    state.offload()
    assert all(parameter.untyped_storage().size() > 0 for parameter in model.parameters())
