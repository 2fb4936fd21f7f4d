"""Read and write weights as files in Hugging Face format: read at the start, written for engines and into checkpoints.

All other files (config, tokenizer, chat template) are copied from the model's own directory, byte by byte, so that the
engine reads what the person gave; only `dtype` is adjusted. Tied tensors are written once, under the name that loaders
look for. The rank server adds the manifest last: a manifest in the model's directory, which is then an export or a
checkpoint of another job, is not copied.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    convert_and_load_state_dict_in_model,
    revert_weight_conversion,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging as transformers_logging

from colocated_rl_api.checkpoint import CONTENTS
from colocated_rl_api.weights import MANIFEST, Digest, Probe
from colocated_rl_trainer.protocol.manifest import Hashing
from colocated_rl_trainer.protocol.settings import ConfigError, LoraConfig
from colocated_rl_trainer.state.checkpoint import OPTIMIZER
from colocated_rl_trainer.state.head import ScoringForward, score_without_logits
from colocated_rl_trainer.state.lora import CONFIG, TENSORS, Adapters, count_adapters, is_of_adapter
from colocated_rl_trainer.state.packing import PACKED_ATTENTION, check_packing
from colocated_rl_trainer.state.sharding import computing_in, device_of, leaves_a_rank_empty, take_over_parts, whole

ADAPTERS = "adapter"  # directory in an export
FILE_BYTES = 128 * 1024**2  # most of one safetensors file, unless one tensor is larger: whole in memory at a time
PROBE_TOKENS = 64  # the more, the steadier is the mean of differences
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".npz", ".index.json")
_OURS = (MANIFEST, CONTENTS, OPTIMIZER)
_PROBE_STRIDE = 7919  # prime: ids all over the vocabulary

_Loading = Mapping[str, Collection[Any]]  # what transformers reports of a load


def load_model(
    directory: Path,
    *,
    packing: bool = False,
    share: Callable[[PreTrainedModel], None] | None = None,
    frozen: torch.dtype | None = None,
) -> PreTrainedModel:
    """Load the causal language model in `directory`, in float32, without dropout. Nothing is ever downloaded.

    packing: attention keeps the samples of one row apart. share: divides the model among ranks, before it has weights:
    of each tensor a rank then reads its part and no more. frozen: dtype of weights that are not trained; all are then.
    Raises ConfigError if the model can't be trained so.
    """
    transformers_logging.disable_progress_bar()
    _check_trainable(directory)
    attention = PACKED_ATTENTION if packing else None
    with _explaining_load_errors(directory):
        if share is None:
            model, loading = _load_whole(directory, attention, frozen)
        else:
            model, loading = _load_part(directory, attention, share, frozen)
    _check_loaded(model, loading, directory)
    model.eval()
    if share is None:
        score_without_logits(model)
    if packing:
        check_packing(model, type(model).__name__)
    return model


def _load_whole(directory: Path, attention: str | None, frozen: torch.dtype | None) -> tuple[PreTrainedModel, _Loading]:
    model, loading = AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=frozen or torch.float32,
        local_files_only=True,
        trust_remote_code=False,  # without it, transformers asks on standard input
        attn_implementation=attention,
        ignore_mismatched_sizes=True,  # otherwise its error names no tensor
        output_loading_info=True,
    )
    model.requires_grad_(frozen is None)
    return model, loading


def _load_part(
    directory: Path, attention: str | None, share: Callable[[PreTrainedModel], None], frozen: torch.dtype | None
) -> tuple[PreTrainedModel, _Loading]:
    """Load as transformers does it, with `share` between the model's definition and its weights.

    Its loader reads the slice of a file that a divided tensor needs, and converts what files hold in another form. It
    can't where a rank gets none of the experts that files hold one by one: then each rank loads all, as one alone.
    """
    config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    dtype = frozen or torch.float32
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    model.requires_grad_(frozen is None)
    conversions = get_model_conversion_mapping(model)
    score_without_logits(model)
    share(model)
    if leaves_a_rank_empty(model) and any(isinstance(each, WeightConverter) for each in conversions):
        model, loading = _load_whole(directory, attention, frozen)
        score_without_logits(model)
        share(model)
        return model, loading
    how = LoadStateDictConfig(
        dtype=dtype,
        device_map={"": device_of(model)},
        ignore_mismatched_sizes=True,
        weight_mapping=conversions,
    )
    with contextlib.ExitStack() as stack:
        slices: dict[str, Any] = {}
        for file in _weight_files(directory):
            content = stack.enter_context(safe_open(file, framework="pt"))
            names = content.keys()
            slices |= {name: _Stored(content.get_slice(name), dtype) for name in names}
        found, _ = convert_and_load_state_dict_in_model(model, slices, how)
    loading = {
        "missing_keys": found.missing_keys - model.all_tied_weights_keys.keys(),
        "mismatched_keys": found.mismatched_keys,
    }
    if not any(loading.values()):
        model._finalize_model_loading(model, how, found)  # noqa: SLF001 - ties weights, computes what no file holds
        take_over_parts(model)
    return model, loading


@dataclass(frozen=True)
class _Stored:
    """Reads a tensor of a file, into memory of its own and as `dtype`; safetensors gives views of the file."""

    content: Any
    dtype: torch.dtype

    def __getitem__(self, part: Any) -> Tensor:
        view: Tensor = self.content[part]
        return view.to(self.dtype, copy=True) if view.is_floating_point() else view.clone()

    def get_shape(self) -> list[int]:
        return list(self.content.get_shape())

    def get_dtype(self) -> str:
        return str(self.content.get_dtype())


def _weight_files(directory: Path) -> Sequence[Path]:
    """Return the files that hold the model. Raises OSError if one is not there."""
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        if not (only := directory / "model.safetensors").is_file():
            raise FileNotFoundError(f"no file named model.safetensors, and no index, in {directory}")
        return [only]
    files = [directory / name for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))]
    if missing := [file for file in files if not file.is_file()]:
        raise FileNotFoundError(f"{missing[0].name} of {index.name} is not there")
    return files


def files_of_model(directory: Path) -> Sequence[Path]:
    """Return config and weights of a model: the files that make it another model if they change."""
    files = sorted(path for path in directory.iterdir() if path.is_file())
    return [path for path in files if path.name == "config.json" or path.name.endswith(_WEIGHT_FILES)]


def _check_loaded(model: PreTrainedModel, loading: _Loading, directory: Path) -> None:
    """Raise ConfigError if files and config are not of one model."""
    if mismatched := sorted(loading["mismatched_keys"]):
        name, has, wanted = mismatched[0]
        raise ConfigError(
            f"the weights in {directory} are not those of its config.json: {len(mismatched)} tensors have another "
            f"shape, first {name}, {list(has)} instead of {list(wanted)}: copy the model again"
        )
    if missing := sorted(loading["missing_keys"]):  # transformers makes them up, at random
        name = type(model).__name__.removeprefix("FSDP")
        raise ConfigError(
            f"the weights in {directory} are not whole: {len(missing)} tensors of {name} are missing, "
            f"first {missing[0]}: copy the model again"
        )
    tied = model.get_expanded_tied_weights_keys(all_submodels=True)
    if differing := sorted(tied.keys() - model.all_tied_weights_keys.keys()):  # which transformers therefore left apart
        name = differing[0]
        raise ConfigError(
            f"{directory} can be read in two ways: its config.json has tie_word_embeddings, and its weights hold "
            f"another {name} than {tied[name]}; transformers would train that, engines leave it out: set "
            f"tie_word_embeddings to false if {name} is part of the model, or remove it from the weights"
        )


def read_config(directory: Path) -> PreTrainedConfig:
    """Read the model's configuration. Raises ConfigError."""
    with _explaining_load_errors(directory):
        config: PreTrainedConfig = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        return config


def count_parameters(directory: Path, lora: LoraConfig | None = None) -> tuple[int, int | None]:
    """Count the parameters that `load_model` would load, without weights, and those of adapters where they are wanted.

    Raises ConfigError if the model can't be trained.
    """
    _check_trainable(directory)
    with _explaining_load_errors(directory), torch.device("meta"):
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        model = AutoModelForCausalLM.from_config(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return parameters, count_adapters(model, lora) if lora else None


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Keep only each layer's input and recompute the rest in the backward pass: less memory, a third more work."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.training = True  # that module alone: those below it still drop nothing out


def write_model(
    model: PreTrainedModel,
    directory: Path | None,
    *,
    origin: Path,
    dtype: torch.dtype,
    adapters: Adapters | None = None,
    file_bytes: int = FILE_BYTES,
) -> dict[str, Digest]:
    """Write the model's weights in `dtype`, and the other files of `origin`, into the empty `directory`.

    adapters: are merged, tensor by tensor, and written by themselves into the directory `ADAPTERS` in it.
    Returns the digests of the weights by file name: each file is hashed while the next one is written.

    Collective where ranks share the model: a rank without a directory only gives its part. No more of the model is
    whole at any time than one file and one tensor. Raises OSError when there is no space.
    """
    parts = _whole_parts(model, dtype, file_bytes, adapters, are_wanted=directory is not None)
    try:
        if directory is None:
            return {}
        if adapters is not None:
            _write_adapters(adapters, directory / ADAPTERS)
        return _write_files(parts, directory, origin=origin, dtype=dtype)
    finally:
        for _ in parts:
            pass  # even if this rank's files failed, its peers wait for its part of theirs


def _write_files(parts: Iterator[_Part], directory: Path, *, origin: Path, dtype: torch.dtype) -> dict[str, Digest]:
    for file in sorted(origin.iterdir()):
        if file.is_file() and not file.name.endswith(_WEIGHT_FILES) and file.name not in _OURS:
            shutil.copyfile(file, directory / file.name)
    _set_dtype(directory / "config.json", dtype)
    weight_map: dict[str, str] = {}
    total_size = 0
    with Hashing() as hashing:
        for part in parts:
            write_tensors(directory / part.file, part.tensors)
            hashing.begin(directory / part.file)
            weight_map |= dict.fromkeys(part.tensors, part.file)
            total_size += sum(tensor.nbytes for tensor in part.tensors.values())
            del part  # before the next is gathered
        if len(set(weight_map.values())) > 1:
            index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
            (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True))
        return hashing.wait()


def _write_adapters(adapters: Adapters, directory: Path) -> None:
    tensors, config = adapters.files()
    directory.mkdir()
    write_tensors(directory / TENSORS, tensors)
    (directory / CONFIG).write_text(json.dumps(config, indent=2))


def write_tensors(file: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write one safetensors file. Raises OSError when there is no space."""
    with _as_os_error():
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            file,
            metadata={"format": "pt"} | dict(metadata or {}),
        )


def probe(model: PreTrainedModel, dtype: torch.dtype, *, float32_head: bool = False) -> Probe:
    """Compute log-probabilities of a fixed sequence at temperature 1, as training computes them."""
    embedding: Any = model.get_input_embeddings()
    ids = [(place + 1) * _PROBE_STRIDE % embedding.num_embeddings for place in range(PROBE_TOKENS)]
    row = torch.tensor([ids], device=embedding.weight.device)
    with torch.no_grad(), computing_in(dtype, model, row.device):
        if isinstance(model.forward, ScoringForward):
            places = torch.arange(PROBE_TOKENS - 1, device=row.device)
            logp, _ = model(
                input_ids=row, use_cache=False, positions=places, predicts=(places >= 0)[None], targets=row[0, 1:],
                temperature=1.0, dtype=dtype, float32_head=float32_head,
            )  # fmt: skip
        else:
            logits = model(input_ids=row, use_cache=False).logits[0, :-1]
            logp = torch.log_softmax(logits.float(), dim=-1).gather(-1, row[0, 1:, None]).squeeze(-1)
    return Probe(input_ids=tuple(ids), logp=tuple(logp.tolist()))


def _check_trainable(directory: Path) -> None:
    """Raise ConfigError for a model that would load, and would not be trained as a person expects."""
    try:
        config = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{directory} holds no model in Hugging Face format: {error}") from error
    if "quantization_config" in config:
        raise ConfigError(f"the weights in {directory} are quantized: give the original ones, these can't be trained")
    if "vision_config" in config or "audio_config" in config:
        raise ConfigError(
            f"{directory} holds a model of more than text ({config.get('model_type')}): not supported yet"
        )
    for file in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):  # reads the header, and compares the file's length with it
                pass
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"{file} is cut off, or not what its name is (a pointer of Git LFS?): copy the model again; {error}"
            ) from error


@contextlib.contextmanager
def _explaining_load_errors(directory: Path) -> Iterator[None]:
    """Raise ConfigError for the many errors of transformers about missing files and unknown architectures."""
    try:
        yield
    except (OSError, ValueError) as error:
        words = str(error).partition("\n")[0]
        raise ConfigError(
            f"no language model can be loaded from {directory}: {words}: copy it again, or take one of an architecture "
            f"that transformers {transformers.__version__} has"
        ) from error


@dataclass(frozen=True)
class _Part:
    """Holds the whole tensors of one file."""

    file: str
    tensors: Mapping[str, Tensor]


def _whole_parts(
    model: PreTrainedModel, dtype: torch.dtype, file_bytes: int, adapters: Adapters | None, *, are_wanted: bool
) -> Iterator[_Part]:
    """Yield the model as loaders of its architecture expect it: no tied duplicate, and names as in the original files.

    are_wanted: this rank needs the parts; if not, it yields none and only gives its peers what they need.
    """
    tied = model.all_tied_weights_keys
    tensors = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if name not in tied and not (adapters and is_of_adapter(name))
    }
    divided = _divide(tensors, dtype, file_bytes)
    for number, names in enumerate(divided, start=1):
        file = f"model-{number:05d}-of-{len(divided):05d}" if len(divided) > 1 else "model"
        gathered = {}
        for name in names:
            tensor = whole(tensors[name])
            if are_wanted:
                if adapters is not None:
                    tensor = adapters.merge(name, tensor)
                gathered[name] = (tensor.to(dtype) if tensor.is_floating_point() else tensor).cpu()
            del tensor
        if are_wanted:
            yield _Part(f"{file}.safetensors", revert_weight_conversion(model, gathered))
        del gathered  # before the next one is


def _divide(tensors: Mapping[str, Tensor], dtype: torch.dtype, file_bytes: int) -> Sequence[Sequence[str]]:
    """Return the tensor names of each file, in the model's order."""
    parts: list[list[str]] = [[]]
    room = file_bytes
    for name, tensor in tensors.items():
        size = tensor.numel() * dtype.itemsize
        if parts[-1] and size > room:
            parts.append([])
            room = file_bytes
        parts[-1].append(name)
        room -= size
    return parts


def _set_dtype(config_file: Path, dtype: torch.dtype) -> None:
    config = json.loads(config_file.read_bytes())
    wanted = str(dtype).removeprefix("torch.")
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    if config.get(key) != wanted:
        config[key] = wanted
        config_file.write_text(json.dumps(config, indent=2))


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
    """Raise OSError for errors of the system, which safetensors reports as text: a full volume is no broken trainer."""
    try:
        yield
    except SafetensorError as error:
        if code := re.search(r"os error (\d+)", str(error)):
            raise OSError(int(code[1]), str(error)) from error
        raise
