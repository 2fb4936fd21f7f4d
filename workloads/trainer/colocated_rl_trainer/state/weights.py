"""Read a model in Hugging Face format, whole or a rank's part of it, and refuse one that can't be trained.

Of a model of more than text, its text model is read, if transformers has that alone as the causal model of the config.
All other tensors stay in the files (`tensors_beside`), and exports hold them as they are. `export` writes both.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
    convert_and_load_state_dict_in_model,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.initialization import guard_torch_init_functions
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging as transformers_logging

from colocated_rl_api.weights import Probe, TensorEntry
from colocated_rl_trainer.protocol.settings import ConfigError, LoraConfig, Unready
from colocated_rl_trainer.state.head import ScoringForward, score_without_logits
from colocated_rl_trainer.state.lora import count_adapters
from colocated_rl_trainer.state.packing import PACKED_ATTENTION, check_packing
from colocated_rl_trainer.state.sharding import computing_in, device_of, leaves_a_rank_empty, take_over_parts

INDEX = "model.safetensors.index.json"
PROBE_TOKENS = 64  # the more, the steadier is the mean of differences
WEIGHT_FILES = (
    ".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".npz", ".ot", ".tflite", ".index.json",
)  # fmt: skip
_INSTEAD = "take a model of text, or one as Qwen3.5, whose text part can be trained alone"
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
    attention = PACKED_ATTENTION if packing else attention_of(read_config(directory))
    with _refusing_own_attention(packing), _explaining_load_errors(directory):
        if share is None:
            model, loading = _load_whole(directory, attention, frozen)
        else:
            model, loading = _load_part(directory, attention, share, frozen)
        if frozen is not None:
            _read_constants(model, directory)
    _check_loaded(model, loading, directory)
    model.eval()
    if share is None:
        score_without_logits(model)
    if packing:
        check_packing(model, type(model).__name__)
    return model


def attention_of(config: PreTrainedConfig) -> str | None:
    """Return the implementation of attention that computes what the model is; None: transformers' choice.

    Its usual one (SDPA) leaves out a soft cap of scores (Gemma 2), which engines apply.
    """
    return "eager" if getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None else None


def kept_in_float32(model: PreTrainedModel, dtype: torch.dtype) -> Callable[[str], object]:
    """Return whether a tensor of this name, in the model or in its files, is float32 in a model of `dtype`.

    So are tensors that transformers names, and all constants that files hold: biases by which tokens choose their
    experts (DeepSeek-V3, GLM-4-MoE, MiniMax-M2) would be rounded to equal ones, and engines have them in float32.
    """
    plan = model._get_dtype_plan(dtype)  # noqa: SLF001 - as `from_pretrained` reads it
    constants = _constants_of(model)
    names = {*constants, *revert_weight_conversion(model, constants)}
    search: Callable[[str], object] = build_glob_alternation(list(plan))[0].search if plan else lambda _: None
    return lambda name: name in names or search(name)


def _constants_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the numbers by name that files hold, and that are not trained."""
    buffers = dict(model.named_buffers())
    return {name: each for name, each in model.state_dict().items() if name in buffers and each.is_floating_point()}


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
    with torch.device("meta"):
        outline = AutoModelForCausalLM.from_config(model.config)  # what was read has no sign of it any more
    _keep_constant(model, _not_trained(outline))
    model.requires_grad_(frozen is None)
    _keep_names(model, directory)
    return model, loading


def _load_part(
    directory: Path, attention: str | None, share: Callable[[PreTrainedModel], None], frozen: torch.dtype | None
) -> tuple[PreTrainedModel, _Loading]:
    """Load as transformers does it, with `share` between the model's definition and its weights.

    Its loader reads the slice of a file that a divided tensor needs, and converts what files hold in another form. It
    can't where a rank gets none of the experts that files hold one by one, nor from files of torch (`.bin`); and where
    files hold other tensors as one, or one as several, its slices are of those. Then each rank loads all, as one alone.
    """
    config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    dtype = frozen or torch.float32
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    _keep_constant(model, _not_trained(model))
    model.requires_grad_(frozen is None)
    read = _keep_names(model, directory) if _has_safetensors(directory) else None
    kept = kept_in_float32(model, dtype)
    conversions = get_model_conversion_mapping(model)
    score_without_logits(model)
    share(model)
    if not _is_in_slices(model, conversions) or not _has_safetensors(directory):
        model, loading = _load_whole(directory, attention, frozen)
        score_without_logits(model)
        share(model)
        return model, loading
    how = LoadStateDictConfig(
        dtype=dtype,
        dtype_plan=model._get_dtype_plan(dtype),  # noqa: SLF001 - as `from_pretrained` does
        device_map={"": device_of(model)},
        ignore_mismatched_sizes=True,
        weight_mapping=conversions,
    )
    stored = _stored(_weight_files(directory), dtype, kept)
    if read is not None:
        stored = {name: each for name, each in stored.items() if name in read}
    found, _ = convert_and_load_state_dict_in_model(model, stored, how)
    loading = {
        "missing_keys": found.missing_keys - model.all_tied_weights_keys.keys(),
        "mismatched_keys": found.mismatched_keys,
    }
    if not any(loading.values()):
        model._finalize_model_loading(model, how, found)  # noqa: SLF001 - ties weights, computes what no file holds
        _compute_buffers_of_layers(model)
        take_over_parts(model)
    return model, loading


def _has_text_part(config: PreTrainedConfig) -> bool:
    """Return whether transformers' causal model of this config is of its text part, as transformers itself decides it.

    Source: `_BaseAutoModelClass.from_config`.
    """
    causal = AutoModelForCausalLM._model_mapping.get(type(config), None)  # noqa: SLF001 - it is nowhere else
    text = config.sub_configs.get("text_config")
    return text is not None and getattr(causal, "config_class", None) is text


def _is_text_part(model: PreTrainedModel, config: PreTrainedConfig) -> bool:
    """Return whether a causal model is the text part alone of what config.json describes."""
    return type(model.config) is not type(config)


def _keep_names(model: PreTrainedModel, directory: Path) -> Set[str] | None:
    """Let a text part be written as its files hold it, and return the names there of its tensors; None: it is no part.

    transformers writes experts one by one if files hold any so, and if these are of a part that is not loaded (the MTP
    head of Qwen3.5-MoE). Ranks must not share the model yet: conversions go by the names of its classes.
    Raises ConfigError if its tensors would be written under other names than they have, and so stand there twice.
    """
    if not _is_text_part(model, read_config(directory)):
        return None
    if not _has_safetensors(directory):
        raise ConfigError(
            f"{directory} holds a model of more than text, in other files than safetensors, of which its other parts "
            "can't be copied: save it again as safetensors"
        )
    own = model.state_dict()

    def those_read(names: Iterable[str], conversions: Sequence[object]) -> Set[str]:
        renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
        converters = [each for each in conversions if isinstance(each, WeightConverter)]
        prefix = model.base_model_prefix
        return {name for name in names if rename_source_key(name, renamings, converters, prefix, own)[0] in own}

    read = those_read(_stored(_weight_files(directory), None), get_model_conversion_mapping(model))
    conversions = get_model_conversion_mapping(model)  # they note what they were used for
    those_read(read, conversions)
    model._weight_conversions = [each for each in conversions if each.was_used()]  # noqa: SLF001 - as its loader does
    if not read or not read <= _names_in_files(model):
        raise ConfigError(
            f"{directory} holds a model of more than text, and transformers {transformers.__version__} can't write the "
            f"tensors of {type(model).__name__} back under their names there: {_INSTEAD}"
        )
    return read


def _names_in_files(model: PreTrainedModel) -> Set[str]:
    outlines = {name: torch.empty(each.shape, device="meta") for name, each in model.state_dict().items()}
    return {*revert_weight_conversion(model, outlines)}


def tensors_beside(model: PreTrainedModel, directory: Path) -> Mapping[str, StoredTensor]:
    """Return the tensors of files of which the model is the text part alone, that are of other parts; otherwise none.

    A head that is tied is of the text part, so a copy of it in files is left out.
    """
    if not _is_text_part(model, read_config(directory)):
        return {}
    own = _names_in_files(model)
    return {name: each for name, each in _stored(_weight_files(directory), None).items() if name not in own}


def _is_in_slices(model: PreTrainedModel, conversions: Sequence[object]) -> bool:
    """Return whether a rank's part of each tensor is a slice of one in the files, or some of the experts there."""
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    others = [each for each in converters if not isinstance(each.operations[0], MergeModulelist)]
    return not _converted(model, others) and not leaves_a_rank_empty(_converted(model, converters))


def _converted(model: PreTrainedModel, conversions: Sequence[WeightConverter]) -> list[Tensor]:
    """Return the parameters that files hold in another form than the model, as experts one by one."""
    backwards = [each.reverse_transform() for each in conversions]
    search = build_glob_alternation(backwards)[0].search
    return [parameter for name, parameter in model.named_parameters() if backwards and search(name)]


def _not_trained(model: PreTrainedModel) -> Sequence[str]:
    """Return the parameters of a new model that its architecture trains in no way by gradients."""
    return [name for name, parameter in model.named_parameters() if not parameter.requires_grad]


def _keep_constant(model: PreTrainedModel, names: Sequence[str]) -> None:
    """Make parameters buffers: nothing updates, decays, divides or rounds them, and they are written as they are.

    They are biases by which tokens choose their experts (ERNIE 4.5, AFMoE, Laguna). In others these are buffers anyway.
    """
    for name in names:
        owner, _, last = name.rpartition(".")
        module = model.get_submodule(owner)
        constant = module.get_parameter(last).detach()
        delattr(module, last)
        module.register_buffer(last, constant)


def _read_constants(model: PreTrainedModel, directory: Path) -> None:
    """Read constants again, which transformers rounds to the dtype of frozen weights unless it names them."""
    constants = _constants_of(model)
    files = _weight_files(directory) if constants and _has_safetensors(directory) else ()
    stored = _stored(files, torch.float32)
    for name, constant in constants.items():
        (named,) = revert_weight_conversion(model, {name: constant})
        if named in stored:
            owner, _, last = name.rpartition(".")
            model.get_submodule(owner).register_buffer(last, stored[named][...].to(constant.device))


def _compute_buffers_of_layers(model: PreTrainedModel) -> None:
    """Compute what no file holds of layers and the model as a whole makes (Falcon-H1's scales).

    transformers takes a class of FSDP2 for code of others, and leaves out its modules without tensors of their own.
    Tensors that were read are marked, and stay.
    """
    with torch.no_grad(), guard_torch_init_functions():
        for part in model.modules():
            has_none = not [*part.parameters(recurse=False), *part.buffers(recurse=False)]
            if has_none and isinstance(part, PreTrainedModel):
                part._init_weights(part)  # noqa: SLF001 - as `from_pretrained` does


class _OpenFile:
    """Keeps the file open that was read last, and no other: what is mapped of a file counts as memory of the process.

    Files are read one after another, but for what a layer has in two. Threads may read at once, each what it asked for.
    """

    def __init__(self) -> None:
        self._open: tuple[Path, Any] | None = None

    def of(self, file: Path) -> Any:
        """Return the file's content. A thread that still reads from another one keeps that."""
        if (known := self._open) is None or known[0] != file:
            self._open = None  # before the next is there
            known = self._open = file, safe_open(file, framework="pt")
        return known[1]

    def close(self) -> None:
        self._open = None


@dataclass(frozen=True)
class StoredTensor:
    """Reads a tensor of a file, into memory of its own and as `dtype`; safetensors gives views of the file."""

    files: _OpenFile
    file: Path
    name: str
    shape: Sequence[int]
    stored_as: str
    dtype: torch.dtype | None  # None: as it is

    @property
    def size_bytes(self) -> int:
        """Return its size in the file."""
        return TensorEntry(dtype=self.stored_as, shape=tuple(self.shape)).size_bytes

    def __getitem__(self, part: Any) -> Tensor:
        view: Tensor = self.files.of(self.file).get_slice(self.name)[part]
        return view.to(self.dtype, copy=True) if self.dtype and view.is_floating_point() else view.clone()

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return self.stored_as


def _stored(
    files: Sequence[Path], dtype: torch.dtype | None, kept: Callable[[str], object] = lambda _: None
) -> dict[str, StoredTensor]:
    """Return the tensors of all files by name, to be read later as `dtype`, or float32 if kept. Raises OSError."""
    opened, found = _OpenFile(), dict[str, StoredTensor]()
    for file in files:
        content = opened.of(file)
        for name in content.keys():  # noqa: SIM118 - it is no mapping
            each = content.get_slice(name)
            read_as = torch.float32 if kept(name) else dtype
            found[name] = StoredTensor(opened, file, name, each.get_shape(), str(each.get_dtype()), read_as)
    opened.close()
    return found


def _has_safetensors(directory: Path) -> bool:
    """Return whether the model is in files of safetensors, or at least should be."""
    return any((directory / name).is_file() for name in (INDEX, "model.safetensors"))


def _weight_files(directory: Path) -> Sequence[Path]:
    """Return the files that hold the model. Raises OSError if one is not there."""
    index = directory / INDEX
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
    return [path for path in files if path.name == "config.json" or path.name.endswith(WEIGHT_FILES)]


def _check_loaded(model: PreTrainedModel, loading: _Loading, directory: Path) -> None:
    """Raise ConfigError if files and config are not of one model."""
    if mismatched := sorted(loading["mismatched_keys"]):
        name, has, wanted = mismatched[0]
        raise Unready(
            f"the weights in {directory} are not those of its config.json: {len(mismatched)} tensors have another "
            f"shape, first {name}, {list(has)} instead of {list(wanted)}: copy the model again"
        )
    if missing := sorted(loading["missing_keys"]):  # transformers makes them up, at random
        name = type(model).__name__.removeprefix("FSDP")
        raise Unready(
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


class ParameterCounts(NamedTuple):
    """Numbers of parameters. adapters: of those that are trained; None: none are wanted. part: of the largest rank.

    bytes_beside: of what the model's files hold beside it, if it is the text part of another.
    """

    parameters: int
    adapters: int | None
    part: int
    bytes_beside: int


def count_parameters(directory: Path, lora: LoraConfig | None = None, *, shared_by: int = 1) -> ParameterCounts:
    """Count the parameters that `load_model` would load, without weights, and those of adapters where they are wanted.

    shared_by: ranks that divide the model as FSDP2 does: by the rows of each tensor, so the first rank has most.
    Raises ConfigError if the model can't be trained.
    """
    _check_trainable(directory)
    config = read_config(directory)
    with _explaining_load_errors(directory), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    sizes = [(each.shape[0] if each.dim() else 1, each.numel()) for each in model.parameters()]
    parameters = sum(size for _, size in sizes)
    part = sum(-(-rows // shared_by) * (size // rows) for rows, size in sizes)
    return ParameterCounts(
        parameters, count_adapters(model, lora) if lora else None, part, _count_bytes_beside(model, config, directory)
    )


def _count_bytes_beside(model: PreTrainedModel, config: PreTrainedConfig, directory: Path) -> int:
    """Count them in the files; where there is config.json alone, of what transformers has beside the text part."""
    if not _is_text_part(model, config):
        return 0
    if _has_safetensors(directory):
        _keep_names(model, directory)
        return sum(each.size_bytes for each in tensors_beside(model, directory).values())
    with torch.device("meta"):
        whole = AutoModelForMultimodalLM.from_config(config)
    return 2 * int(whole.num_parameters() - model.num_parameters())  # bfloat16


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Keep only each layer's input and recompute the rest in the backward pass: less memory, a third more work."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.training = True  # that module alone: those below it still drop nothing out
            for name, value in vars(layer).items():
                if "drop" in name and isinstance(value, float):  # what it drops out by itself, when it is in training
                    setattr(layer, name, 0.0)


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
        raise Unready(f"{directory} holds no model in Hugging Face format: {error}") from error
    if "quantization_config" in config:
        raise ConfigError(f"the weights in {directory} are quantized: give the original ones, these can't be trained")
    if ("vision_config" in config or "audio_config" in config) and not _has_text_part(read_config(directory)):
        raise ConfigError(
            f"{directory} holds a model of more than text ({config.get('model_type')}), and transformers "
            f"{transformers.__version__} has no causal model of its text part alone: {_INSTEAD}"
        )
    for file in sorted(directory.glob("*.safetensors")):
        try:
            file.open("rb").close()
        except OSError as error:  # where the reader of safetensors says "no such file" of one that it may not read
            raise Unready(
                f"{file} can't be read: copy it again, or let everybody read it: save_pretrained does not; {error}"
            ) from error
        try:
            with safe_open(file, framework="pt"):  # reads the header, and compares the file's length with it
                pass
        except (OSError, SafetensorError) as error:
            raise Unready(
                f"{file} is cut off, or not what its name is (a pointer of Git LFS?): copy the model again; {error}"
            ) from error


@contextlib.contextmanager
def _refusing_own_attention(packing: bool) -> Iterator[None]:
    """Raise ConfigError where an architecture has a table of attentions of its own (GPT-J), without that of packing."""
    try:
        yield
    except KeyError as error:
        if not packing or error.args != (PACKED_ATTENTION,):
            raise
        raise ConfigError("packing: the model computes attention by itself: leave packing out") from error


@contextlib.contextmanager
def _explaining_load_errors(directory: Path) -> Iterator[None]:
    """Raise ConfigError for the many errors of transformers about missing files and unknown architectures."""
    try:
        yield
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        words = str(error).partition("\n")[0]
        raise Unready(
            f"no language model can be loaded from {directory}: {words}: copy it again, or take one of an architecture "
            f"that transformers {transformers.__version__} has"
        ) from error
