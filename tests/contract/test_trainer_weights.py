"""The default trainer writes weights that load back as they were, under the names that loaders look for."""

from __future__ import annotations

import copy
import errno
import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from full_disk import no_file_above
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from colocated_rl_api.checkpoint import CONTENTS
from colocated_rl_api.weights import MANIFEST
from colocated_rl_trainer.protocol.manifest import digest_of, tensor_entries
from colocated_rl_trainer.protocol.settings import ConfigError, Unready
from colocated_rl_trainer.state.checkpoint import OPTIMIZER
from colocated_rl_trainer.state.export import Writers, _File, write_model
from colocated_rl_trainer.state.packing import ends_of
from colocated_rl_trainer.state.residency import Residency
from colocated_rl_trainer.state.tensor_file import PIECE_BYTES, write_tensors
from colocated_rl_trainer.state.weights import checkpoint_activations, kept_in_float32, load_model, probe
from fakes.tiny_model import write_tiny_model


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def origin(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model", tied=request.param)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def test_export_has_the_tensors_of_the_original(origin: Path, out: Path) -> None:
    write_model(load_model(origin), out, origin=origin, dtype=torch.float32)

    assert tensor_entries(origin / "model.safetensors") == tensor_entries(out / "model.safetensors")


def test_export_holds_the_weights_as_they_are_now(origin: Path, out: Path) -> None:
    model = load_model(origin)
    state = Residency(model, torch.device("cpu"))
    state.parameters[0].mul_(1.5)

    write_model(model, out, origin=origin, dtype=torch.float32)

    again = load_model(out)
    for expected, parameter in zip(model.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=0, atol=0)
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    torch.testing.assert_close(again(input_ids=ids).logits, model(input_ids=ids).logits, rtol=0, atol=0)


def test_everything_but_weights_is_copied_byte_by_byte(origin: Path, out: Path) -> None:
    (origin / "chat_template.jinja").write_text("{{ messages }}")
    (origin / "pytorch_model.bin").write_bytes(b"old")
    (origin / "model.safetensors.index.json").write_text("{}")
    (origin / "rust_model.ot").write_bytes(b"as large as the model")
    (origin / "additional_chat_templates").mkdir()
    (origin / "additional_chat_templates/tool_use.jinja").write_text("{{ tools }}")

    write_model(load_model(origin), out, origin=origin, dtype=torch.float32)

    other = "additional_chat_templates/tool_use.jinja"
    assert (origin / other).read_bytes() == (out / other).read_bytes()
    copied = ["chat_template.jinja", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    assert [*copied, "model.safetensors"] == sorted(
        (file.name for file in out.iterdir() if file.is_file()), key=_weights_last
    )
    for name in copied:
        assert (origin / name).read_bytes() == (out / name).read_bytes()


@pytest.mark.parametrize("name", [MANIFEST, CONTENTS, OPTIMIZER])
def test_model_that_is_an_export_or_a_checkpoint_leaves_nothing_of_that_in_ours(
    origin: Path, out: Path, name: str
) -> None:
    """Its manifest made a torn export look whole, and its optimizer's state filled the volume."""
    (origin / name).write_bytes(b"of another job")

    write_model(load_model(origin), out, origin=origin, dtype=torch.float32)

    assert not (out / name).exists()


def test_export_in_half_precision_says_so(origin: Path, out: Path) -> None:
    write_model(load_model(origin), out, origin=origin, dtype=torch.bfloat16)

    assert {"BF16"} == {entry.dtype for entry in tensor_entries(out / "model.safetensors").values()}
    assert "bfloat16" == json.loads((out / "config.json").read_bytes())["dtype"]


SMALL: dict[str, Any] = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
SPARSE = {  # attention that reads some positions alone
    "intermediate_size": 64, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "index_n_heads": 2, "index_head_dim": 16,
}  # fmt: skip
ROPE = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ARCHITECTURES: dict[str, PreTrainedConfig] = {
    "qwen2": transformers.Qwen2Config(**SMALL, tie_word_embeddings=False),
    "qwen2 tied": transformers.Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen3 moe": transformers.Qwen3MoeConfig(**SMALL, **EXPERTS, head_dim=8),
    "llama": transformers.LlamaConfig(
        **SMALL, rope_parameters=ROPE | {"original_max_position_embeddings": 32}, tie_word_embeddings=False
    ),
    "llama tied": transformers.LlamaConfig(**SMALL, tie_word_embeddings=True),
    "mistral": transformers.MistralConfig(**SMALL),
    "gemma2": transformers.Gemma2Config(**SMALL, head_dim=8, attn_logit_softcapping=0.1),
    "gemma3": transformers.Gemma3TextConfig(**SMALL, head_dim=8),
    "phi3": transformers.Phi3Config(**SMALL),
    "olmo2": transformers.Olmo2Config(**SMALL),
    "glm4 moe": transformers.Glm4MoeConfig(
        **SMALL,
        head_dim=8,
        moe_intermediate_size=16,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    ),
    "minimax m2": transformers.MiniMaxM2Config(**SMALL, head_dim=8, num_local_experts=4, num_experts_per_tok=2),
    "ernie moe": transformers.Ernie4_5_MoeConfig(
        **SMALL, moe_intermediate_size=16, moe_num_experts=4, moe_k=2, moe_layer_start_index=1
    ),
    "falcon h1": transformers.FalconH1Config(
        **SMALL,
        head_dim=8,
        mamba_d_ssm=32,
        mamba_n_heads=4,
        mamba_d_head=8,
        mamba_d_state=8,
        mamba_n_groups=1,
        mamba_chunk_size=16,
        ssm_multipliers=[0.5, 0.6, 0.7, 0.8, 0.9],
    ),
    "apertus": transformers.ApertusConfig(**SMALL),
    "biogpt": transformers.BioGptConfig(**SMALL),
    "opt": transformers.OPTConfig(
        vocab_size=48,
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    ),
    "gpt2": transformers.GPT2Config(vocab_size=48, n_positions=64, n_embd=32, n_layer=2, n_head=4, eos_token_id=1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_export_of_any_architecture_is_what_transformers_loads(
    tmp_path: Path, out: Path, name: str, dtype: torch.dtype
) -> None:
    """Nothing missing and nothing left over, under the names of the original, in several files."""
    torch.manual_seed(0)
    origin = tmp_path / "origin"
    AutoModelForCausalLM.from_config(ARCHITECTURES[name]).save_pretrained(origin)
    model = load_model(origin)
    Residency(model, torch.device("cpu")).parameters[0].mul_(1.5)
    for buffer in _written_buffers(model).values():
        # biases of experts, which bfloat16 would make equal
        buffer.add_(torch.linspace(4, 4.01, buffer.numel()).view_as(buffer))

    write_model(model, out, origin=origin, dtype=dtype, file_bytes=20_000)

    again, loading = AutoModelForCausalLM.from_pretrained(out, dtype="auto", output_loading_info=True)
    assert not any(loading.values()), loading
    assert dtype == again.dtype
    found = again.state_dict()
    for each, parameter in model.named_parameters():
        expected = parameter if kept_in_float32(model, dtype)(each) else parameter.to(dtype)
        torch.testing.assert_close(found[each], expected, rtol=0, atol=0)
    held = {each: tensor for file in out.glob("*.safetensors") for each, tensor in load_file(file).items()}
    for each, tensor in revert_weight_conversion(model, _written_buffers(model)).items():
        assert torch.equal(held[each], tensor)
    index = json.loads((out / "model.safetensors.index.json").read_bytes())["weight_map"]
    assert tensor_entries(origin / "model.safetensors").keys() == index.keys()


def test_tensors_that_files_hold_as_one_are_written_into_one_file(tmp_path: Path, out: Path) -> None:
    """Files of HRM-Text have one tensor for queries, keys and values: two files had parts of it, under one name."""
    torch.manual_seed(0)
    origin = tmp_path / "origin"
    AutoModelForCausalLM.from_config(transformers.HrmTextConfig(**SMALL, head_dim=8)).save_pretrained(origin)

    write_model(load_model(origin), out, origin=origin, dtype=torch.float32, file_bytes=20_000)

    written = [tensor_entries(file) for file in sorted(out.glob("*.safetensors"))]
    assert len(written) > 2
    assert tensor_entries(origin / "model.safetensors") == {
        name: entry for entries in written for name, entry in entries.items()
    }


@pytest.mark.parametrize(
    ("name", "last"),
    [("minimax m2", "e_score_correction_bias"), ("ernie moe", "e_score_correction_bias"), ("apertus", "act_fn.beta")],
)
def test_constants_are_not_rounded_with_the_weights_that_adapters_leave_alone(
    tmp_path: Path, name: str, last: str
) -> None:
    """transformers reads those of MiniMax-M2 in bfloat16, and an engine in float32. Apertus' are single numbers."""
    origin = tmp_path / "model"
    AutoModelForCausalLM.from_config(ARCHITECTURES[name]).save_pretrained(origin)
    tensors = load_file(origin / "model.safetensors")
    (constant,) = [each for each in tensors if "layers.1." in each and each.endswith(last)]
    tensors[constant] = torch.linspace(4.001, 4.01, tensors[constant].numel()).view_as(tensors[constant])
    save_file(tensors, origin / "model.safetensors", {"format": "pt"})

    model = load_model(origin, frozen=torch.bfloat16)

    held = revert_weight_conversion(model, _written_buffers(model))
    assert torch.equal(tensors[constant], held[constant])


def _written_buffers(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the numbers that are no parameters and stand in files."""
    buffers = dict(model.named_buffers())
    return {name: each for name, each in model.state_dict().items() if name in buffers and each.is_floating_point()}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_any_architecture_computes_what_transformers_plain_attention_does_and_drops_nothing_out(
    tmp_path: Path, name: str
) -> None:
    """Its usual attention left Gemma 2's soft cap out, and layers that recompute dropped out by themselves."""
    torch.manual_seed(0)
    config = copy.deepcopy(ARCHITECTURES[name])
    config.initializer_range = 0.3
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32, attn_implementation="eager")
    ids = torch.arange(40)[None] * 7919 % 48
    model = load_model(tmp_path / "model")
    with torch.no_grad():
        expected = plain.eval()(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, expected, rtol=1e-3, atol=1e-3)
        checkpoint_activations(model)
        torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, expected, rtol=1e-3, atol=1e-3)


def test_large_export_is_divided_and_loads_as_one(origin: Path, out: Path) -> None:
    model = load_model(origin)

    write_model(model, out, origin=origin, dtype=torch.float32, file_bytes=20_000)

    files = sorted(out.glob("*.safetensors"))
    index = json.loads((out / "model.safetensors.index.json").read_bytes())["weight_map"]
    assert 2 < len(files)
    assert {name: file.name for file in files for name in _names(file)} == index
    for expected, parameter in zip(model.parameters(), load_model(out).parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=0, atol=0)


def test_probe_is_of_each_token_given_those_before_it(origin: Path) -> None:
    model = load_model(origin)

    logps = probe(model, torch.float32)

    assert len(logps.input_ids) - 1 == len(logps.logp)
    assert 10 < len(set(logps.input_ids))
    for place in (0, 7, len(logps.logp) - 1):
        logits = model(input_ids=torch.tensor([logps.input_ids[: place + 1]])).logits[0, -1]
        expected = torch.log_softmax(logits, -1)[logps.input_ids[place + 1]].item()
        assert expected == pytest.approx(logps.logp[place], abs=1e-5)


def test_probe_tells_changed_weights_apart(origin: Path) -> None:
    model = load_model(origin)
    before = probe(model, torch.float32)
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.down_proj.weight").mul_(1.01)

    assert 1e-5 < max(abs(a - b) for a, b in zip(before.logp, probe(model, torch.float32).logp, strict=True))


def test_packed_samples_are_computed_as_transformers_own_attention_computes_them(tmp_path: Path) -> None:
    """It finds the samples of a row by their positions, and masks all others."""
    origin = write_tiny_model(tmp_path / "model")
    lengths = (7, 1, 19, 12)
    ids = torch.arange(sum(lengths))[None] * 7919 % 48
    places = torch.cat([torch.arange(length) for length in lengths])[None]

    def computed(model: PreTrainedModel, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logits = model(input_ids=ids, position_ids=places, use_cache=False, **options).logits[0]
        torch.log_softmax(logits, dim=-1)[:-1].gather(1, ids[0, 1:, None]).sum().backward()
        return logits.detach(), torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])

    theirs = computed(AutoModelForCausalLM.from_pretrained(origin, dtype=torch.float32))
    ours = computed(load_model(origin, packing=True), sample_ends=ends_of(lengths))
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine - other).norm() < 1e-5 * other.norm()


def test_packing_is_refused_where_samples_would_see_each_other(tmp_path: Path) -> None:
    """A layer with a window asks its mask for it: packed, its samples would be computed with another attention."""
    origin = write_tiny_model(tmp_path / "model")
    config = json.loads((origin / "config.json").read_bytes())
    load_model(origin, packing=True)
    config |= {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True, "sliding_window": 4}
    (origin / "config.json").write_text(json.dumps(config))

    with pytest.raises(ConfigError, match=r"packing: .* in Qwen3ForCausalLM: leave packing out"):
        load_model(origin, packing=True)


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (transformers.MistralConfig(**SMALL, sliding_window=32), "windows"),
        (transformers.Phi3Config(**SMALL, sliding_window=32), "windows"),
        (transformers.Gemma2Config(**SMALL, head_dim=8, layer_types=["full_attention"] * 2), "a soft cap"),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_packing_is_refused_where_attention_is_more_than_that_of_packed_samples(
    tmp_path: Path, config: PreTrainedConfig, what: str
) -> None:
    """The samples of the comparison are shorter than any window, and say nothing of it."""
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    with pytest.raises(
        ConfigError,
        match=f"packing: attention has {what}, which packed samples lack, in .*ForCausalLM: leave packing out",
    ):
        load_model(tmp_path / "model", packing=True)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (transformers.PhimoeConfig(**SMALL, num_local_experts=4, sliding_window=32), "would see each other"),
        (transformers.GPTJConfig(vocab_size=48, n_embd=32, n_layer=2, n_head=4, rotary_dim=4), "attention by itself"),
        (transformers.DeepseekV32Config(**SMALL | SPARSE), "attention by itself"),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_packing_is_refused_where_attention_is_not_what_packing_replaces(
    tmp_path: Path, config: PreTrainedConfig, message: str
) -> None:
    """PhiMoE has a window in its mask alone, and was computed without it. The others ended in a traceback."""
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match=f"packing: .*{message}.*: leave packing out") as refused:
        load_model(tmp_path / "model", packing=True)
    assert not isinstance(refused.value, Unready)  # to start again is of no use


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("quantization_config", "are quantized: give the original ones"),
        ("vision_config", r"more than text \(qwen3\), and transformers .* no causal model of its text part alone: "),
    ],
)
def test_model_that_cannot_be_trained_is_refused(tmp_path: Path, key: str, message: str) -> None:
    origin = write_tiny_model(tmp_path / "model")
    config = json.loads((origin / "config.json").read_bytes()) | {key: {}}
    (origin / "config.json").write_text(json.dumps(config))

    with pytest.raises(ConfigError, match=message):
        load_model(origin)


@pytest.mark.parametrize("tied", [True, False])
def test_model_that_is_not_whole_is_refused(tmp_path: Path, tied: bool) -> None:
    """A tensor that a copy had lost was made up at random, and trained."""
    origin = write_tiny_model(tmp_path / "model", tied=tied)
    load_model(origin)
    tensors = load_file(origin / "model.safetensors")
    del tensors["model.layers.0.mlp.down_proj.weight"]
    write_tensors(origin / "model.safetensors", tensors)

    with pytest.raises(
        ConfigError, match=r"not whole: 1 tensors of Qwen3ForCausalLM are missing, first model.layers.0"
    ):
        load_model(origin)


def cut_off(origin: Path) -> None:
    file = origin / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def leave_a_pointer(origin: Path) -> None:
    (origin / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")


def lead_nowhere(origin: Path) -> None:
    file = origin / "model.safetensors"
    file.unlink()
    file.symlink_to(origin / "blobs/gone")


def lose_a_file(origin: Path) -> None:
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (origin / "model.safetensors").unlink()
    (origin / "model.safetensors.index.json").write_text(json.dumps(index))


def lose_all_files(origin: Path) -> None:
    (origin / "model.safetensors").unlink()


def untie(origin: Path) -> None:
    """Leave the model as a training run leaves a tied model whose head alone was changed."""
    tensors = load_file(origin / "model.safetensors")
    write_tensors(origin / "model.safetensors", tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1})


def change_config(origin: Path, **changes: object) -> None:
    config = json.loads((origin / "config.json").read_bytes()) | changes
    (origin / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (cut_off, r"model\.safetensors is cut off, .*: copy the model again; "),
        (leave_a_pointer, r"model\.safetensors is cut off, or not what its name is \(a pointer of Git LFS\?\)"),
        (lead_nowhere, r"model\.safetensors can't be read: .* let everybody read it.*; .*No such file"),
        (lose_a_file, r"be loaded from .*/model: .*model-00001-of-00002\.safetensors.*: copy it again"),
        (lose_all_files, r"be loaded from .*/model: .* no file named model\.safetensors.*: copy it again"),
        (partial(change_config, hidden_size=8), r"have another shape, first .* instead of .*: copy the model again"),
        (untie, r"in two ways: .* another lm_head\.weight than model\.embed_tokens\.weight; .* to false if lm_head"),
        (partial(change_config, model_type="qwen99"), r"`qwen99`.*, or take one of an architecture that transformers"),
        (partial(change_config, model_type="own", auto_map={"AutoConfig": "own.Own"}), r"contains custom code"),
    ],
)
def test_model_that_can_not_be_loaded_is_reported_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Path], None], message: str
) -> None:
    """The report was the loader's own: it named no file that was cut off, and custom code gave nothing for 15 s."""
    origin = write_tiny_model(tmp_path / "model")
    spoil(origin)
    monkeypatch.setattr("builtins.input", lambda _: pytest.fail("standard input is nobody's"))

    with pytest.raises(ConfigError, match=message):
        load_model(origin)


def test_a_head_that_stands_twice_and_is_the_same_stays_tied(tmp_path: Path, out: Path) -> None:
    origin = write_tiny_model(tmp_path / "model")
    tensors = load_file(origin / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    write_tensors(origin / "model.safetensors", tensors | {"lm_head.weight": embedding.clone()})

    model = load_model(origin)
    write_model(model, out, origin=origin, dtype=torch.float32)

    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tensors.keys() == load_file(out / "model.safetensors").keys()


def test_numbers_that_are_no_weights_keep_their_type_in_half_precision(origin: Path, out: Path) -> None:
    model = load_model(origin)
    model.register_buffer("seen", torch.tensor([2**20 + 1]))

    write_model(model, out, origin=origin, dtype=torch.bfloat16)

    written = load_file(out / "model.safetensors")
    assert [2**20 + 1] == written.pop("seen").tolist()
    assert {torch.bfloat16} == {tensor.dtype for tensor in written.values()}


def test_directory_that_holds_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{tmp_path} holds no model in Hugging Face format"):
        load_model(tmp_path)


MIXED = {
    "norm": torch.arange(7, dtype=torch.float32),
    "scalar": torch.tensor(2.5),
    "embedding": torch.randn(300, 1200),
    "turned": torch.randn(40, 30).T,
    "half": torch.randn(5, 5, dtype=torch.bfloat16),
    "seen": torch.tensor([2**40]),
    "none": torch.zeros(0, 3),
}


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_file_has_the_bytes_that_safetensors_writes_and_the_digest_is_of_them(
    out: Path, dtype: torch.dtype | None
) -> None:
    """Sizes from nothing to more than a piece."""
    file = out / "model.safetensors"

    digest = write_tensors(file, MIXED, dtype=dtype)

    in_dtype = {
        name: tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor for name, tensor in MIXED.items()
    }
    save_file(
        {name: tensor.contiguous() for name, tensor in in_dtype.items()}, out / "other", metadata={"format": "pt"}
    )
    assert PIECE_BYTES < MIXED["embedding"].nbytes
    assert (out / "other").read_bytes() == file.read_bytes()
    assert digest == digest_of(file)


def test_file_that_is_written_again_stays_as_it_was_for_those_who_have_mapped_it(out: Path) -> None:
    """An engine may have an older file in its memory."""
    file = out / "model.safetensors"
    write_tensors(file, {"a": torch.ones(10_000)})
    mapped = load_file(file)

    write_tensors(file, {"a": torch.zeros(3)})

    assert torch.equal(torch.ones(10_000), mapped["a"])
    assert torch.equal(torch.zeros(3), load_file(file)["a"])


@pytest.mark.parametrize("writers", [1, 2, 3, 4, 8])
def test_files_are_divided_so_that_every_writer_has_as_much_to_do(writers: int) -> None:
    """A model of 7 billion parameters: two large files at its ends, and over a hundred between them."""
    files = [
        _File("first", [], 1090),
        *(_File(f"layer {number}", [], 128) for number in range(102)),
        _File("last", [], 1090),
    ]

    loads: Counter[int] = Counter()
    for file, ranks in Writers(0, [range(writers), [writers]]).assign(files):
        loads.update(dict.fromkeys(ranks, file.size))

    whole = sum(file.size for file in files)
    assert whole == loads.pop(writers), "a pod of one rank"
    assert (writers, whole) == (len(loads), loads.total())
    assert max(loads.values()) - min(loads.values()) <= 128


def test_what_the_volume_refuses_is_an_error_of_the_system(out: Path) -> None:
    """A full volume was taken for a broken trainer: safetensors has an error type of its own."""
    with no_file_above(1000), pytest.raises(OSError, match="File too large") as refused:
        write_tensors(out / "model.safetensors", {"a": torch.zeros(10_000)})

    assert errno.EFBIG == refused.value.errno


def _names(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as opened:
        return list(opened.keys())


def _weights_last(name: str) -> tuple[bool, str]:
    return name.endswith(".safetensors"), name
