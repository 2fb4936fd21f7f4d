"""The trainer trains the text part of a model of more than text; its other parts stay in each export as they are.

The engine can't run these models on a CPU. What is shown is what the files hold, and that transformers loads them.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import transformers
from contract.test_trainer_memory import differing_tensors
from contract.test_trainer_weights import EXPERTS, SMALL
from contract.trainer_in_process import RankInProcess
from contract.trainer_ranks_in_process import UnwatchedTrainer, in_ranks
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig

from colocated_rl_trainer.conformance import checks
from colocated_rl_trainer.conformance.shards import Example, write_shards
from colocated_rl_trainer.grpo.budget import VERSIONS
from colocated_rl_trainer.protocol.manifest import digests_of, tensor_entries
from colocated_rl_trainer.protocol.settings import ConfigError, TrainerConfig, Unready
from colocated_rl_trainer.ref_policy.score_queue import QueuedSample
from colocated_rl_trainer.ref_policy.scorer import Scorer
from colocated_rl_trainer.state.export import ADAPTERS, write_index, write_model
from colocated_rl_trainer.state.rehearsal import Pass, pass_bytes
from colocated_rl_trainer.state.weights import count_parameters, load_model, read_config, tensors_beside

Tensors = Mapping[str, torch.Tensor]

HYBRID: dict[str, Any] = {
    "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
SIGHT = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32,
    "num_position_embeddings": 16,
}  # fmt: skip
TEXT = SMALL | HYBRID | {"initializer_range": 0.3}
SPARSE = {name: value for name, value in TEXT.items() if name != "intermediate_size"} | EXPERTS | {
    "shared_expert_intermediate_size": 16
}  # fmt: skip
NGRAMS = {
    "hc_count": 2, "hc_lowrank": 4, "ple_layer_ids": [1], "ple_embed_dim": 32, "ngram_vocab_size_base": 100,
    "split_ngram_parts": 2, "make_ngram_vocab_size_divisible_by": 8, "heads_per_ngram": 2, "indexer_n_heads": 2,
    "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 16, "indexer_compress_ratio": 4,
}  # fmt: skip
TIED = {"tie_word_embeddings": True}
TRAINED: dict[str, PreTrainedConfig] = {
    "qwen3.5": transformers.Qwen3_5Config(text_config=TEXT, vision_config=SIGHT),
    "qwen3.5 tied": transformers.Qwen3_5Config(text_config=TEXT | TIED, vision_config=SIGHT, **TIED),
    "qwen3.5 moe": transformers.Qwen3_5MoeConfig(text_config=SPARSE, vision_config=SIGHT),
    "qwen4": transformers.Qwen4ExpConfig(text_config=SPARSE | NGRAMS, vision_config=SIGHT),
}
PLAIN_SIGHT = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
MTP = "mtp.layers.0.mlp.experts"


def write_origin(directory: Path, name: str = "qwen3.5", *, fused: bool = False) -> Path:
    """Write a model in bfloat16, with an MTP head that transformers ignores. fused: experts of a layer are one tensor.

    Qwen3.5-35B-A3B has its experts so, and those of its MTP head one by one.
    """
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(TRAINED[name]).to(torch.bfloat16).save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    if fused:
        own = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).state_dict()
        tensors = {each: tensor for each, tensor in tensors.items() if ".experts." not in each} | {
            each.replace("model.", "model.language_model."): tensor
            for each, tensor in own.items()
            if ".experts." in each
        }
    head = {f"{MTP}.{number}.{part}_proj.weight": torch.randn(4, 2) for number in range(2) for part in ("gate", "up")}
    head |= {"mtp.fc.weight": torch.randn(4, 4, dtype=torch.float64), "mtp.count": torch.tensor(7)}
    save_file(tensors | head, directory / "model.safetensors", {"format": "pt"})
    return directory


def tensors_in(directory: Path) -> dict[str, torch.Tensor]:
    return {name: each for file in directory.glob("*.safetensors") for name, each in load_file(file).items()}


def is_of_text(name: str) -> bool:
    return name.startswith(("model.language_model.", "lm_head."))


def require_other_parts(origin: Path, export: Path) -> None:
    """Fail unless the export holds the names of the origin, and what is not of the text part as it is there."""
    wanted, found = tensors_in(origin), tensors_in(export)
    assert wanted.keys() == found.keys()
    others = [name for name in wanted if not is_of_text(name)]
    assert {"mtp.count", "model.visual.patch_embed.proj.weight"} < {*others}
    for name in others:
        assert (wanted[name].dtype, wanted[name].shape) == (found[name].dtype, found[name].shape)
        assert wanted[name].flatten().view(torch.uint8).equal(found[name].flatten().view(torch.uint8)), name


# -------------------------------------------------------------------------------------------------------------- exports
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "fused"),
    [("qwen3.5", False), ("qwen3.5 tied", False), ("qwen3.5 moe", False), ("qwen3.5 moe", True), ("qwen4", False)],
)
def test_export_is_the_whole_model_with_the_text_part_as_it_is_now(
    tmp_path: Path, name: str, fused: bool, dtype: torch.dtype
) -> None:
    """Fused experts were written one by one, for the MTP head's sake, and the engine would have served the old ones."""
    origin, out = write_origin(tmp_path / "origin", name, fused=fused), tmp_path / "out"
    out.mkdir()
    model = load_model(origin)
    with torch.no_grad():
        for each in model.parameters():
            each.mul_(1.5)

    digests = write_model(model, out, origin=origin, dtype=dtype, file_bytes=20_000)

    require_other_parts(origin, out)
    files = sorted(out.glob("*.safetensors"))
    assert digests_of(files) == digests
    index = json.loads((out / "model.safetensors.index.json").read_bytes())["weight_map"]
    assert {each: file.name for file in files for each in tensor_entries(file)} == index
    again, loading = AutoModelForImageTextToText.from_pretrained(out, dtype=dtype, output_loading_info=True)
    assert not any(loading.values()), loading
    ids = torch.arange(12)[None] * 7919 % 48
    with torch.no_grad():
        mine = load_model(out)(input_ids=ids).logits
        torch.testing.assert_close(again.float()(input_ids=ids).logits, mine, rtol=0, atol=1e-4)
        if dtype is torch.float32:
            torch.testing.assert_close(model(input_ids=ids).logits, mine, rtol=0, atol=0)


def test_config_names_the_dtype_of_the_text_part_where_an_engine_reads_it(tmp_path: Path) -> None:
    origin, out = write_origin(tmp_path / "origin"), tmp_path / "out"
    out.mkdir()
    before = json.loads((origin / "config.json").read_bytes())

    write_model(load_model(origin), out, origin=origin, dtype=torch.float32)

    after = json.loads((out / "config.json").read_bytes())
    assert ("bfloat16", "float32") == (before["text_config"]["dtype"], after["text_config"]["dtype"])
    assert before["vision_config"] == after["vision_config"]
    assert before["architectures"] == after["architectures"]


def test_a_tied_head_that_files_hold_too_is_not_left_as_it_was(tmp_path: Path) -> None:
    """It is the embeddings again: an engine would have read the old ones."""
    origin, out = write_origin(tmp_path / "origin", "qwen3.5 tied"), tmp_path / "out"
    out.mkdir()
    tensors = tensors_in(origin)
    tensors["lm_head.weight"] = tensors["model.language_model.embed_tokens.weight"].clone()
    save_file(tensors, origin / "model.safetensors", {"format": "pt"})

    write_model(load_model(origin), out, origin=origin, dtype=torch.bfloat16)

    assert tensors.keys() - tensors_in(out).keys() == {"lm_head.weight"}


def test_export_whose_origin_has_gone_is_an_error_of_the_volume(tmp_path: Path) -> None:
    origin = write_origin(tmp_path / "origin")
    trainer = RankInProcess(tmp_path, origin, longest=16)
    (origin / "model.safetensors").unlink()
    (tmp_path / "out").mkdir()

    with pytest.raises(OSError, match=r"model\.safetensors"):
        trainer.loop.export(tmp_path / "out")


# ---------------------------------------------------------------------------------------------------------------- ranks
def samples(step: int) -> list[Example]:
    return [
        Example([1 + number, 2], [3 + number % 5, 4, 5 + step], [-3.0] * 3, float(number % 3), number // 4, step - 1)
        for number in range(8)
    ]


def train_and_export(trainer: UnwatchedTrainer) -> Mapping[str, str]:
    """Train a step and return the digests of the files that this rank wrote."""
    folder, ranks = trainer.folder, trainer.group.size
    mine = folder / f"rank-{trainer.rank}"
    mine.mkdir()
    trainer.train(1, write_shards(mine, samples(1), step=1, split=ranks)[trainer.rank], trainer)
    trainer.save(1, keep=1)
    out = folder / f"export-of-{ranks}"
    out.mkdir(exist_ok=True)
    trainer.file_bytes = 20_000
    written = trainer.write_weights(out)
    trainer.group.gather(None)
    if trainer.rank == 0:
        write_index(out)
    return written


@pytest.mark.parametrize(
    ("name", "fused", "state"), [("qwen3.5 moe", True, "Sharded"), ("qwen3.5", False, "Replicated")]
)
def test_ranks_write_the_whole_model_together_and_save_what_they_train_alone(
    tmp_path: Path, name: str, fused: bool, state: str
) -> None:
    origin = write_origin(tmp_path / "origin", name, fused=fused)
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()

    [alone] = in_ranks(1, one, origin, train_and_export, longest=16, learningRate=0.01)
    written = in_ranks(2, two, origin, train_and_export, longest=16, learningRate=0.01, trainingState=state)

    assert alone.keys() == written[0].keys() | written[1].keys()
    assert not written[0].keys() & written[1].keys()
    assert all(written)
    exact, found = tensors_in(one / "export-of-1"), tensors_in(two / "export-of-2")
    require_other_parts(origin, two / "export-of-2")
    for each, tensor in exact.items():
        torch.testing.assert_close(found[each], tensor, rtol=0, atol=1e-3)
    text = [each for each in exact if is_of_text(each)]
    before = tensors_in(origin)
    assert any(not torch.equal(exact[each], before[each].float()) for each in text)
    saved = sum(file.stat().st_size for file in (one / "checkpoints").rglob("*.distcp"))
    assert saved < 3 * 4 * sum(exact[each].numel() for each in text) + 200_000


@pytest.mark.parametrize(("name", "fused"), [("qwen3.5", False), ("qwen3.5 moe", False), ("qwen3.5 moe", True)])
def test_what_ranks_load_is_the_text_part(tmp_path: Path, name: str, fused: bool) -> None:
    origin = write_origin(tmp_path / "origin", name, fused=fused)

    assert [[]] * 2 == in_ranks(2, tmp_path, origin, differing_tensors, longest=16)


def test_adapters_are_merged_into_the_text_part_and_saved_alone(tmp_path: Path) -> None:
    origin, out = write_origin(tmp_path / "origin"), tmp_path / "out"
    out.mkdir()
    lora = {"rank": 4, "alpha": 6}
    trainer = RankInProcess(tmp_path, origin, longest=16, lora=lora, dtype="bfloat16", learningRate=0.05)
    trainer.train(samples(1))

    trainer.loop.export(out)

    require_other_parts(origin, out)
    before, after = tensors_in(origin), tensors_in(out)
    changed = {each for each in before if not torch.equal(before[each], after[each])}
    adapted = {
        each.removeprefix("base_model.model.").rpartition(".lora_")[0].replace("model.", "model.language_model.", 1)
        for each in load_file(out / ADAPTERS / "adapter_model.safetensors")
    }
    assert changed == {f"{each}.weight" for each in adapted}


def test_batches_of_the_conformance_checks_are_of_the_whole_vocabulary(tmp_path: Path) -> None:
    kind = SimpleNamespace(model=write_origin(tmp_path / "origin"))

    [shard] = checks.batch(cast(Any, SimpleNamespace(kind=kind, folder=tmp_path, size=1)), 1)

    assert 32 <= load_file(shard)["tokens"].max() < SMALL["vocab_size"]


# ------------------------------------------------------------------------------------------------------------ reference
def test_reference_of_its_own_scores_by_the_text_part(tmp_path: Path) -> None:
    """Samples of several lengths in one pass: each as the whole model computes it alone."""
    origin = write_origin(tmp_path / "origin")
    scorer = Scorer(origin, "cpu", TrainerConfig.model_validate({}))
    assert scorer.vocabulary == SMALL["vocab_size"]
    whole = AutoModelForImageTextToText.from_pretrained(origin, dtype=torch.float32)
    queued = [QueuedSample(memoryview(array("i", [2, *range(3, 3 + length)])), 1, 1.0) for length in (9, 4, 17)]

    for sample, found in zip(queued, scorer.score(queued), strict=True):
        ids = torch.tensor([sample.ids.tolist()])
        with torch.no_grad():
            logp = whole(input_ids=ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
        torch.testing.assert_close(torch.frombuffer(bytearray(found), dtype=torch.float32), logp, rtol=0, atol=1e-4)


# --------------------------------------------------------------------------------------------------------------- memory
@pytest.mark.parametrize("name", TRAINED)
def test_memory_of_exports_has_all_parts(tmp_path: Path, name: str) -> None:
    """It had the text part alone, so the volume of weights was full at the first export."""
    origin, out = write_origin(tmp_path / "origin", name), tmp_path / "out"
    out.mkdir()
    model = load_model(origin)
    write_model(model, out, origin=origin, dtype=torch.bfloat16)

    counts = count_parameters(origin)

    parts = [each.size_bytes for file in out.glob("*.safetensors") for each in tensor_entries(file).values()]
    others = sum(each.size_bytes for each in tensors_beside(model, origin).values())
    assert others == counts.bytes_beside
    buffers = 100  # numbers that are neither trained nor beside
    assert sum(parts) - buffers < counts.parameters * 2 + counts.bytes_beside <= sum(parts)
    budget = RankInProcess(tmp_path, origin, longest=16).loop._forecast.budget(recomputes=False)
    assert budget.exports == VERSIONS * (4 * counts.parameters + counts.bytes_beside)
    (origin / "model.safetensors").unlink()
    of_config = count_parameters(origin)  # which says nothing of MTP heads
    assert counts._replace(bytes_beside=0) == of_config._replace(bytes_beside=0)
    assert 0.9 * counts.bytes_beside < of_config.bytes_beside < counts.bytes_beside


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.5 moe"])
def test_pass_of_the_text_part_is_rehearsed(tmp_path: Path, name: str) -> None:
    config = read_config(write_origin(tmp_path / "origin", name))
    few, more = (pass_bytes(config, Pass(tokens, torch.float32)) for tokens in (16, 32))
    assert few
    assert more
    assert few < more


# -------------------------------------------------------------------------------------------------------------- refused
@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            transformers.Gemma3Config(text_config=SMALL | {"head_dim": 8}, vision_config=PLAIN_SIGHT),
            r"more than text \(gemma3\), and transformers .* has no causal model of its text part alone: take a mo",
        ),
        (
            transformers.Qwen3VLConfig(
                text_config=SMALL | {"head_dim": 8}, vision_config=SIGHT | {"deepstack_visual_indexes": [0]}
            ),
            r"more than text \(qwen3_vl\), and transformers .* has no causal model of its text part alone: take a mo",
        ),
        (
            transformers.Llama4Config(
                text_config=SMALL | {"intermediate_size_mlp": 64, "num_local_experts": 2, "head_dim": 8},
                vision_config=PLAIN_SIGHT
                | {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
            ),
            r"can't write the tensors of Llama4ForCausalLM back under their names there: take a model of text, or",
        ),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_model_whose_text_part_can_not_be_trained_alone_is_refused(
    tmp_path: Path, config: PreTrainedConfig, message: str
) -> None:
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path / "model")

    for load in (load_model, count_parameters, partial(load_model, frozen=torch.bfloat16)):
        with pytest.raises(ConfigError, match=message) as refused:
            load(tmp_path / "model")
        assert not isinstance(refused.value, Unready)  # to start again is of no use


def test_other_parts_that_are_in_no_safetensors_are_refused(tmp_path: Path) -> None:
    origin = write_origin(tmp_path / "origin")
    torch.save(tensors_in(origin), origin / "pytorch_model.bin")
    (origin / "model.safetensors").unlink()

    with pytest.raises(ConfigError, match=r"in other files than safetensors, .* save it again as safetensors"):
        load_model(origin)


def test_text_part_that_is_not_whole_is_to_be_copied_again(tmp_path: Path) -> None:
    origin = write_origin(tmp_path / "origin")
    tensors = tensors_in(origin)
    del tensors["model.language_model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, origin / "model.safetensors", {"format": "pt"})

    with pytest.raises(Unready, match=r"not whole: 1 tensors of Qwen3_5ForCausalLM are missing, first model.layers.1"):
        load_model(origin)


@pytest.mark.parametrize("name", TRAINED)
def test_samples_of_one_row_are_refused_where_a_layer_has_a_state(tmp_path: Path, name: str) -> None:
    origin = write_origin(tmp_path / "origin", name)
    with pytest.raises(ConfigError, match=r"packing: .* leave packing out"):
        load_model(origin, packing=True)
