"""What the reference trainer writes: weights that load back as they were, under the names that loaders look for."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
import torch
from full_disk import no_file_above
from safetensors import safe_open
from safetensors.torch import load_file

from colocated_rl_api.weights import MANIFEST
from colocated_rl_trainer.checkpoint import CONTENTS, OPTIMIZER
from colocated_rl_trainer.manifest import tensor_entries
from colocated_rl_trainer.residency import Residency
from colocated_rl_trainer.settings import SettingsError
from colocated_rl_trainer.weights import load_model, probe, write_model, write_tensors
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

    write_model(load_model(origin), out, origin=origin, dtype=torch.float32)

    copied = ["chat_template.jinja", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    assert [*copied, "model.safetensors"] == sorted((file.name for file in out.iterdir()), key=_weights_last)
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

    told = probe(model, torch.float32)

    assert len(told.input_ids) - 1 == len(told.logp)
    assert 10 < len(set(told.input_ids))
    for place in (0, 7, len(told.logp) - 1):
        logits = model(input_ids=torch.tensor([told.input_ids[: place + 1]])).logits[0, -1]
        expected = torch.log_softmax(logits, -1)[told.input_ids[place + 1]].item()
        assert expected == pytest.approx(told.logp[place], abs=1e-5)


def test_probe_tells_changed_weights_apart(origin: Path) -> None:
    model = load_model(origin)
    before = probe(model, torch.float32)
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.down_proj.weight").mul_(1.01)

    assert 1e-5 < max(abs(a - b) for a, b in zip(before.logp, probe(model, torch.float32).logp, strict=True))


def test_packing_is_refused_where_samples_would_see_each_other(tmp_path: Path) -> None:
    """A layer with a window asks its mask for it: packed, its samples would be computed with another attention."""
    origin = write_tiny_model(tmp_path / "model")
    config = json.loads((origin / "config.json").read_bytes())
    load_model(origin, packing=True)
    config |= {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True, "sliding_window": 4}
    (origin / "config.json").write_text(json.dumps(config))

    with pytest.raises(SettingsError, match=r"packing: .* in Qwen3ForCausalLM: leave packing out"):
        load_model(origin, packing=True)


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("quantization_config", "are quantized: give the original ones"),
        ("vision_config", r"more than text \(qwen3\): not supported yet"),
    ],
)
def test_model_that_cannot_be_trained_is_refused(tmp_path: Path, key: str, said: str) -> None:
    origin = write_tiny_model(tmp_path / "model")
    config = json.loads((origin / "config.json").read_bytes()) | {key: {}}
    (origin / "config.json").write_text(json.dumps(config))

    with pytest.raises(SettingsError, match=said):
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
        SettingsError, match=r"not whole: 1 tensors of Qwen3ForCausalLM are missing, first model.layers.0"
    ):
        load_model(origin)


def test_numbers_that_are_no_weights_keep_their_type_in_half_precision(origin: Path, out: Path) -> None:
    model = load_model(origin)
    model.register_buffer("seen", torch.tensor([2**20 + 1]))

    write_model(model, out, origin=origin, dtype=torch.bfloat16)

    written = load_file(out / "model.safetensors")
    assert [2**20 + 1] == written.pop("seen").tolist()
    assert {torch.bfloat16} == {tensor.dtype for tensor in written.values()}


def test_directory_that_holds_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=rf"{tmp_path} holds no model in Hugging Face format"):
        load_model(tmp_path)


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
