"""The check of new weights over architectures, with the real engine: it accepts what the trainer exports of each, and
misses no parameter but those that are named here.

Models are small and random, in float32, in which engine and trainer differ by the order of their sums alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig

from colocated_rl_agent.drivers.sglang import SGLang
from colocated_rl_agent.files.exports import TensorDigests, read_tensor_file
from colocated_rl_agent.lanes.probe import ProbeDisagrees, require_agreement
from colocated_rl_agent.lanes.update_check import UpdateDoubted, require_changes
from colocated_rl_api.rungs import WeightVersion
from colocated_rl_api.weights import Probe
from colocated_rl_trainer.state.export import write_model
from colocated_rl_trainer.state.weights import load_model, probe
from engines import ADMIN_KEY, engine_process
from fakes.engine_model import make_tokenizer

pytestmark = pytest.mark.slow

OLD, NEW = WeightVersion(0, 1), WeightVersion(1, 1)
STEP = 0.02  # of each element
CALL_S = 120.0
FLAGS = ("--max-total-tokens", "2048", "--context-length", "512")
SMALL: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.1, "bos_token_id": None,
}  # fmt: skip
HEADS = {"head_dim": 16}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
GROUPS = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}


@dataclass(frozen=True)
class Architecture:
    """A model of this architecture. not_judged: last words of parameters that have no tensor of their name."""

    config: PreTrainedConfig
    not_judged: Sequence[str] = ()


IN_CI = {
    "gemma3": Architecture(transformers.Gemma3TextConfig(**SMALL, **HEADS)),
    "phi3": Architecture(transformers.Phi3Config(**SMALL)),
    "granite": Architecture(
        transformers.GraniteConfig(**SMALL, embedding_multiplier=2.0, logits_scaling=2.0, residual_multiplier=0.5)
    ),
    "mixtral": Architecture(transformers.MixtralConfig(**SMALL, num_local_experts=8)),
    "gpt neox": Architecture(  # by SGLang's fallback, which serves transformers' own model
        transformers.GPTNeoXConfig(**{name: size for name, size in SMALL.items() if name != "num_key_value_heads"}),
        not_judged=("embed_in.weight", "final_layer_norm.weight", "final_layer_norm.bias", "lm_head.weight"),
    ),
}
OTHERS = {
    "llama": Architecture(transformers.LlamaConfig(**SMALL, tie_word_embeddings=False)),
    "mistral": Architecture(transformers.MistralConfig(**SMALL)),
    "ministral3": Architecture(transformers.Ministral3Config(**SMALL, **HEADS)),
    "qwen2": Architecture(transformers.Qwen2Config(**SMALL, tie_word_embeddings=False)),
    "qwen2 tied": Architecture(transformers.Qwen2Config(**SMALL, tie_word_embeddings=True)),
    "qwen3": Architecture(transformers.Qwen3Config(**SMALL, **HEADS)),
    "gemma": Architecture(transformers.GemmaConfig(**SMALL, **HEADS)),
    "gemma2": Architecture(
        transformers.Gemma2Config(**SMALL, **HEADS, hidden_act="gelu_pytorch_tanh"),
        not_judged=("normalizer", "gemma_weight"),
    ),
    "olmo2": Architecture(transformers.Olmo2Config(**SMALL)),
    "glm4": Architecture(transformers.Glm4Config(**SMALL, **HEADS)),
    "cohere": Architecture(transformers.CohereConfig(**SMALL)),
    "cohere2": Architecture(transformers.Cohere2Config(**SMALL)),
    "smollm3": Architecture(transformers.SmolLM3Config(**SMALL)),
    "seed oss": Architecture(transformers.SeedOssConfig(**SMALL, **HEADS)),
    "ernie": Architecture(transformers.Ernie4_5Config(**SMALL, **HEADS)),
    "arcee": Architecture(transformers.ArceeConfig(**SMALL)),
    "helium": Architecture(transformers.HeliumConfig(**SMALL, **HEADS)),
    "stablelm": Architecture(transformers.StableLmConfig(**SMALL)),
    "starcoder2": Architecture(transformers.Starcoder2Config(**SMALL)),
    "gpt2": Architecture(transformers.GPT2Config(vocab_size=300, n_positions=512, n_embd=64, n_layer=2, n_head=4)),
    "apertus": Architecture(transformers.ApertusConfig(**SMALL)),
    "qwen3 moe": Architecture(transformers.Qwen3MoeConfig(**SMALL, **EXPERTS, **HEADS, num_experts=8)),
    "olmoe": Architecture(
        transformers.OlmoeConfig(**SMALL | {"num_key_value_heads": 4}, num_experts=8, num_experts_per_tok=2)
    ),
    "glm4 moe": Architecture(transformers.Glm4MoeConfig(**SMALL, **EXPERTS, **GROUPS, **HEADS, n_routed_experts=8)),
    "ernie moe": Architecture(
        transformers.Ernie4_5_MoeConfig(
            **SMALL, moe_intermediate_size=32, moe_num_experts=8, moe_k=2, moe_layer_start_index=1
        ),
        not_judged=("e_score_correction_bias",),
    ),
}


@dataclass(frozen=True)
class ExportedVersions:
    """The exports of two versions of a model, in directories of their names."""

    root: Path
    probes: dict[WeightVersion, Probe]

    def directory(self, version: WeightVersion) -> Path:
        return self.root / str(version)

    def digests(self, version: WeightVersion) -> TensorDigests:
        (file,) = self.directory(version).glob("*.safetensors")
        return read_tensor_file(file).digests


def export_two_versions(root: Path, config: PreTrainedConfig) -> ExportedVersions:
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    origin = root / "origin"
    AutoModelForCausalLM.from_config(config).save_pretrained(origin)
    tokenizer.save_pretrained(origin)
    model, found = load_model(origin), ExportedVersions(root, {})
    for version in (OLD, NEW):
        found.directory(version).mkdir()
        write_model(model, found.directory(version), origin=origin, dtype=torch.float32)
        found.probes[version] = probe(model, torch.float32)
        for tensor in model.state_dict().values():  # constants too
            tensor.add_(STEP * torch.randn(tensor.shape).sign())
    return found


@pytest.mark.parametrize(
    "architecture",
    [
        *(pytest.param(each, id=name) for name, each in IN_CI.items()),
        *(pytest.param(each, id=name, marks=pytest.mark.release) for name, each in OTHERS.items()),
    ],
)
async def test_the_engine_takes_what_the_trainer_exports_and_every_parameter_is_judged(
    tmp_path: Path, architecture: Architecture
) -> None:
    """Mixtral's experts were not judged, and each engine of GPT-NeoX was ended at its first update."""
    exports = export_two_versions(tmp_path, architecture.config)
    with engine_process(exports.directory(OLD), version=OLD, root=tmp_path, flags=FLAGS) as process:
        await asyncio.to_thread(process.wait_until_up)
        async with aiohttp.ClientSession() as session:
            engine = SGLang(session, url=process.url, admin_key=ADMIN_KEY, call_s=CALL_S)
            await require_probe(engine, exports.probes[OLD])
            await engine.pause()
            _, held = await engine.checksum()
            await engine.update(exports.directory(NEW), NEW)
            _, found = await engine.checksum()
            await engine.continue_()
            await require_probe(engine, exports.probes[NEW])
            with pytest.raises(ProbeDisagrees):
                await require_probe(engine, exports.probes[OLD])
            await engine.pause()
            await engine._call("POST", "/weights_checker", {"action": "reset_tensors"})
            await engine.update(exports.directory(OLD), OLD)
            _, again = await engine.checksum()

    old, new = exports.digests(OLD), exports.digests(NEW)
    judged = [name for name in found if not name.endswith(tuple(architecture.not_judged))]
    assert len(judged) == require_changes(old, new, held, found, before=None, dtype="float32")
    for stale in judged:
        with pytest.raises(UpdateDoubted, match=f"1 of {len(judged)} .* first {stale}:"):
            require_changes(old, new, held, {**found, stale: held[stale]}, before=None, dtype="float32")
    assert {name: held[name] for name in judged} == {name: again[name] for name in judged}, "an update writes them all"


async def require_probe(engine: SGLang, exported: Probe) -> None:
    found = await engine.input_logprobs(exported.input_ids)
    require_agreement(exported.logp, found, noise_nats=None, is_exact=True)
