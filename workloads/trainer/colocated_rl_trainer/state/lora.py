"""Train low-rank adapters (LoRA, Hu et al. 2021): with the model's weights frozen, W + (alpha / rank) B A is trained.

An adapter is two matrices beside a linear layer: A, [rank, in], random at first, and B, [out, rank], zero at first, so
training begins with the model as it is. They are float32 and small: ranks that share a model each hold all of them, and
sum their gradient once for each update. Products, initial values and files are those of peft, whose layers the vendor's
image of the engine does not have: what is written loads with `PeftModel.from_pretrained`.

The same layers compute in three ways: with the adapters beside the weights, as training does; without them, which is
the model that the job began with; and with merged weights, rounded as an export rounds them, which is what an engine
computes with. Merged weights are made for one layer at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import dropout, linear
from transformers import PreTrainedModel

from colocated_rl_api.weights import Digest
from colocated_rl_trainer.protocol.settings import ConfigError, LoraConfig

A, B = "lora_A", "lora_B"  # as peft names them
CONFIG, TENSORS = ("adapter_config.json", "adapter_model.safetensors")  # as peft names them
_WEIGHT = ".weight"
_PREFIX = "base_model.model."  # of tensors in peft's files


class AdapterOrigin(BaseModel):
    """Adapters of a checkpoint belong to this: they mean nothing beside another model, or at another scale."""

    rank: int
    alpha: float
    base: dict[str, Digest]  # of config and weights of the model that the job began with, by file name

    def require_same(self, other: AdapterOrigin, *, checkpoint: str) -> None:
        """Raise ConfigError if the adapters of a checkpoint are of another origin than this, which the job wants."""
        if (self.rank, self.alpha) != (other.rank, other.alpha):
            raise ConfigError(
                f"checkpoint {checkpoint} has adapters of rank {other.rank} and alpha {other.alpha:g}, and lora in "
                f"spec.trainer.config has {self.rank} and {self.alpha:g}: set it as it was, or give the job another "
                "volume for checkpoints"
            )
        names = sorted(self.base.keys() | other.base)
        if differing := [name for name in names if self.base.get(name) != other.base.get(name)]:
            raise ConfigError(
                f"checkpoint {checkpoint} has adapters of another model than spec.model, {len(differing)} files "
                f"differ, first {differing[0]}: set spec.model as it was, or give the job another volume for "
                "checkpoints"
            )


class _Way(Enum):
    """This is how adapted layers compute."""

    BESIDE = auto()
    WITHOUT = auto()
    MERGED = auto()


class Adapters:
    """Holds the adapters of one model. Its other parameters must be frozen before."""

    def __init__(self, model: PreTrainedModel, config: LoraConfig, *, seed: int = 0) -> None:
        """Add an adapter to each targeted layer, on the device of its weight. Raises ConfigError if a name fits none.

        seed: of A's initial values, the same on every rank.
        """
        self._config = config
        self._scale = config.alpha / config.rank
        self._way = _Way.BESIDE
        self._layers = _targets(model, config)
        self._names = _shortest_names(model, self._layers)
        random = torch.Generator().manual_seed(seed)
        for layer in self._layers.values():
            first = torch.empty(config.rank, layer.in_features)
            nn.init.kaiming_uniform_(first, a=math.sqrt(5), generator=random)
            second = torch.zeros(layer.out_features, config.rank)
            for name, value in ((A, first), (B, second)):
                matrix = nn.Linear(value.shape[1], value.shape[0], bias=False, device="meta")
                matrix.weight = nn.Parameter(value.to(layer.weight.device))
                layer.add_module(name, matrix)
            layer.register_forward_hook(self._compute)

    @contextmanager
    def without(self) -> Iterator[None]:
        """Let the model compute as it did before it had adapters."""
        with self._in(_Way.WITHOUT):
            yield

    @contextmanager
    def merged(self) -> Iterator[None]:
        """Let the model compute with merged weights in the dtype of its own. Without gradients."""
        with self._in(_Way.MERGED):
            yield

    def merge(self, name: str, weight: Tensor) -> Tensor:
        """Return a whole tensor of the model with its adapter merged, in float32, or itself where it has none."""
        layer = self._layers.get(name.removesuffix(_WEIGHT)) if name.endswith(_WEIGHT) else None
        return weight if layer is None else self._merged_weight(layer, weight)

    def files(self) -> tuple[Mapping[str, Tensor], Mapping[str, object]]:
        """Return what peft's two files hold, TENSORS on the host and CONFIG."""
        tensors = {
            f"{_PREFIX}{name}.{matrix}{_WEIGHT}": layer.get_submodule(matrix).weight.detach().cpu()
            for name, layer in self._layers.items()
            for matrix in (A, B)
        }
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": None,
            "r": self._config.rank,
            "lora_alpha": self._config.alpha,
            "lora_dropout": self._config.dropout,
            "target_modules": self._names,
            "bias": "none",
            "inference_mode": True,
        }
        return tensors, config

    @contextmanager
    def _in(self, way: _Way) -> Iterator[None]:
        self._way = way
        try:
            yield
        finally:
            self._way = _Way.BESIDE

    def _compute(self, layer: Any, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        """Return the output of an adapted layer, given that of its own weight."""
        (values,) = inputs
        match self._way:
            case _Way.WITHOUT:
                return output
            case _Way.MERGED:
                return linear(values, self._merged_weight(layer, layer.weight).to(layer.weight.dtype), layer.bias)
            case _Way.BESIDE:
                if self._config.dropout and torch.is_grad_enabled():
                    values = dropout(values, self._config.dropout)
                first, second = (matrix.weight.to(values.dtype) for matrix in (layer.lora_A, layer.lora_B))
                return output + linear(linear(values, first), second) * self._scale

    def _merged_weight(self, layer: Any, weight: Tensor) -> Tensor:
        first, second = layer.lora_A.weight.detach(), layer.lora_B.weight.detach()
        merged: Tensor = weight.detach().float() + second @ first * self._scale
        return merged


def count_adapters(model: PreTrainedModel, config: LoraConfig) -> int:
    """Return how many parameters the adapters of a model have. Raises ConfigError if a name fits no layer."""
    layers = _targets(model, config).values()
    return sum(config.rank * (layer.in_features + layer.out_features) for layer in layers)


def is_of_adapter(name: str) -> bool:
    """Return True for the name of an adapter's tensor."""
    return name.endswith((f".{A}{_WEIGHT}", f".{B}{_WEIGHT}"))


def _targets(model: PreTrainedModel, config: LoraConfig) -> Mapping[str, Any]:
    """Return the layers to adapt, by name. Raises ConfigError."""
    head = model.get_output_embeddings()
    found = {name: layer for name, layer in model.named_modules() if layer is not head and _is_product(layer)}
    known = sorted({name.rpartition(".")[2] for name in found})
    if not known:
        raise ConfigError(f"lora in spec.trainer.config: {type(model).__name__} has no linear layer to adapt")
    if config.target_modules is None:
        return found
    for target in config.target_modules:
        if not any(_fits(name, target) for name in found):
            raise ConfigError(
                f"lora.targetModules in spec.trainer.config: no linear layer is named {target}; there are: "
                f"{', '.join(known)}"
            )
    return {
        name: layer for name, layer in found.items() if any(_fits(name, target) for target in config.target_modules)
    }


def _is_product(layer: nn.Module) -> bool:
    """Return True for a layer whose output is the product of its input and its weight.

    Some classes of linear layers return more: routers choose experts too (Llama 4, PhiMoE), or groups have a product
    each (DeepSeek-V4). What a layer of another class returns is asked of it with tensors that have no content.
    """
    if not isinstance(layer, nn.Linear) or type(layer).forward is nn.Linear.forward:
        return isinstance(layer, nn.Linear)
    outlines = {name: torch.empty(each.shape, device="meta") for name, each in layer.named_parameters()}
    try:
        output = functional_call(layer, outlines, torch.empty(2, layer.in_features, device="meta"))
    except (IndexError, RuntimeError, TypeError, ValueError):  # its input has another form
        return False
    return isinstance(output, Tensor) and output.shape == (2, layer.out_features)


def _fits(name: str, target: str) -> bool:
    """Return True if the target is the name of a module or its last parts, as peft compares them."""
    return f".{name}".endswith(f".{target}")


def _shortest_names(model: nn.Module, layers: Mapping[str, object]) -> list[str]:
    """Return target modules that mean these layers and no others: last parts of names, or whole names."""
    last = sorted({name.rpartition(".")[2] for name in layers})
    meant = {name for name, _ in model.named_modules() if any(_fits(name, target) for target in last)}
    return last if meant == layers.keys() else sorted(layers)
