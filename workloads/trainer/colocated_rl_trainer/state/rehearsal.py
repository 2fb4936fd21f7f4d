"""Find what a pass through a model holds in memory, by a pass that takes none.

The model's own layers, head and backward pass run on torch's fake tensors, which have shapes and no content, divided by
FSDP2 among ranks that are only pretended where ranks share the model. Every storage is counted from its first use to
its release. So activations, recomputation, logits, gathered layers and the buffers of collectives are what torch makes
of this architecture, and no formula of ours has to know it.

A model of many layers is rehearsed with few of them, and with one round of layers more: one layer, or several where
kinds take turns, as attention and state spaces do. Until the gradient of the last round and of the layer before it is
known, each round adds the same. From there on memory only falls, apart from what the first layers and the embeddings
need at the end. A model without such rounds is rehearsed with all of its layers.

Kernels are those of a CPU. On a GPU, attention and products allocate the same outputs; libraries' workspaces, the
driver's context and the gaps of an allocator are not counted. Where a model attends by SDPA, attention is that of
packed samples, which has no mask: transformers makes one for tensors without content, though causal attention needs
none. Scores that a CPU keeps for want of a kernel (`_attend_as_devices`) are left out of a pass on a device.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import pad
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from colocated_rl_api.logs import log
from colocated_rl_trainer.protocol.settings import LoraConfig
from colocated_rl_trainer.state.head import ScoringForward, form_of_logits
from colocated_rl_trainer.state.lora import Adapters
from colocated_rl_trainer.state.packing import PACKED_ATTENTION, attend
from colocated_rl_trainer.state.sharding import (
    computing_in,
    divide,
    part_of,
    pretended_mesh,
)
from colocated_rl_trainer.state.weights import attention_of, checkpoint_activations

FEW = 3  # layers at least: while gradients of one are computed, FSDP2 holds those of another, and gathers a third
_ATTENTION_OF_DEVICES = "colocated_rl_rehearsed"
_PRODUCT_OVER_EXPERTS = "aten._grouped_mm.default"

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pass:
    """Makes a forward and backward pass of a rank, as the trainer does."""

    tokens: int  # all of them predict one
    dtype: torch.dtype
    longest: int | None = None  # tokens of the longest sample; None: all are of one
    shared_by: int = 1  # ranks that divide the model
    recomputes: bool = False  # activations
    float32_head: bool = False
    with_entropy: bool = False  # in the loss
    lora: LoraConfig | None = None
    on_cpu: bool = False

    @property
    def rows(self) -> Sequence[tuple[int, int]]:
        """Return number and width of the rows of two passes, of which one takes most where scores take their square.

        The first has as many samples of full length as fit, the second all tokens in one row more.
        """
        longest = self.longest or self.tokens
        whole = max(1, self.tokens // longest)
        return (whole, longest), (whole + 1, self.tokens // (whole + 1))


def pass_bytes(config: PreTrainedConfig, of: Pass) -> int | None:
    """Return the most that a pass holds beside parameters and their gradients, in bytes, on each rank.

    None: what the model computes depends on values, or on a mask that packed samples lack, so it can't be rehearsed.
    There must be no process group yet.
    """
    with _pretending_ranks(of.shared_by):
        try:
            outline = _outline(config)
            kinds = _kinds(outline)
            passes = of.rows if _attention_in(outline) == "eager" else [(1, of.tokens)]
            return max(_most(config, of, rows, kinds) for rows in passes)
        except Exception as error:  # noqa: BLE001 - of fake tensors, or of an architecture; it is an estimate
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            log(_LOG, "a pass can't be rehearsed", logging.WARNING, model=config.model_type, reason=reason)
            return None


def _most(config: PreTrainedConfig, of: Pass, rows: tuple[int, int], kinds: Sequence[object]) -> int:
    layers: int = config.get_text_config().num_hidden_layers
    few, a_round = few_of(kinds) if len(kinds) == layers else (layers, 1)
    fewer, more = (_with_layers(config, count) for count in (few, few + a_round))
    if few + a_round >= layers or _kinds(_outline(more)) != kinds[: few + a_round]:
        return max(_rehearse(config, of, rows, a_round=1))
    early, _ = _rehearse(fewer, of, rows, a_round=a_round)
    later, late = _rehearse(more, of, rows, a_round=a_round)
    return max(early + (layers - few) // a_round * (later - early), late)


def few_of(kinds: Sequence[object]) -> tuple[int, int]:
    """Return how many layers tell of all together with one round more, and the layers of a round.

    Rounds of equal kinds follow one another behind the first layers, which may be of others. kinds: of all layers.
    """
    layers = len(kinds)
    found = [
        (first + max(FEW, 2 * a_round) + (layers - first) % a_round, a_round)
        for a_round in range(1, layers + 1)
        for first in range(layers)
        if all(kinds[at] == kinds[at + a_round] for at in range(first, layers - a_round))
    ]
    return min(found, key=lambda each: (sum(each), each))


def _attention_in(model: PreTrainedModel) -> str:
    """Return the implementation of attention that transformers has chosen for a model."""
    found: str = model.config._attn_implementation  # noqa: SLF001 - it is nowhere else
    return found


def _outline(config: PreTrainedConfig) -> PreTrainedModel:
    """Return the model without memory, with the attention that transformers chooses for it."""
    with torch.device("meta"):
        outline: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation=attention_of(config))
    return outline


def _kinds(model: PreTrainedModel) -> list[object]:
    """Return names and shapes of the parameters of each layer."""
    layers = (layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer))
    return [tuple((name, each.shape) for name, each in layer.named_parameters()) for layer in layers]


def _with_layers(config: PreTrainedConfig, count: int) -> PreTrainedConfig:
    fewer = copy.deepcopy(config)
    text = fewer.get_text_config()
    layers = text.num_hidden_layers
    for name, value in vars(text).items():
        if isinstance(value, list) and len(value) == layers:  # an entry for each layer
            setattr(text, name, value[:count])
    text.num_hidden_layers = count
    return fewer


def _rehearse(config: PreTrainedConfig, of: Pass, rows: tuple[int, int], *, a_round: int) -> tuple[int, int]:
    """Return the peak until the gradient of the last round, and of a layer more, is known, and the peak after that."""
    outline = _outline(config)
    form = form_of_logits(outline)
    attention = _attention_in(outline)
    with FakeTensorMode():
        dtype = of.dtype if of.lora else torch.float32
        sdpa = PACKED_ATTENTION if of.on_cpu else _ATTENTION_OF_DEVICES
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=sdpa if attention == "sdpa" else attention
        )
        model.eval().requires_grad_(of.lora is None)
        if form is not None:
            ScoringForward(model, form)
        if of.shared_by > 1:
            divide(model, torch.device("cpu"), ranks=of.shared_by, dtype=of.dtype)
        if of.lora:
            Adapters(model, of.lora)
        if of.recomputes:
            checkpoint_activations(model)
        held = _Storages(model)
        _at_gradient_of_last_layers(model, a_round + 1, held.begin_second_part)
        ids = torch.zeros(rows, dtype=torch.int64)
        with held:
            logp, entropy = _forward(model, ids, of)
            (logp.sum() + entropy.sum() if of.with_entropy else logp.sum()).backward()
    return held.first_peak, held.peak


def _attend_as_devices(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Compute attention without keeping scores also where values are less wide than keys (MLA).

    Devices have a kernel for that, a CPU has not: values are as wide as keys here.
    """
    if missing := key.shape[-1] - value.shape[-1]:
        attended, _ = attend(module, query, key, pad(value, (0, missing)), mask, **options)
        return attended[..., :-missing], None
    return attend(module, query, key, value, mask, **options)


AttentionInterface.register(_ATTENTION_OF_DEVICES, _attend_as_devices)


def _forward(model: Any, ids: Tensor, of: Pass) -> tuple[Tensor, Tensor]:
    places, width = torch.arange(ids.numel()), ids.shape[1]
    with computing_in(of.dtype, model, ids.device):
        if isinstance(model.forward, ScoringForward):
            scored: tuple[Tensor, Tensor] = model(
                input_ids=ids, use_cache=False, positions=places[:width], predicts=(places // width, places % width),
                targets=ids.flatten(), temperature=1.0, dtype=of.dtype, float32_head=of.float32_head,
            )  # fmt: skip
            return scored
        logits = model(input_ids=ids, use_cache=False).logits.flatten(0, 1).float()
    logp = torch.log_softmax(logits, dim=-1)
    return logp.gather(-1, ids.view(-1, 1)), -(logp.exp() * logp).sum(-1)


def _at_gradient_of_last_layers(model: nn.Module, count: int, do: Any) -> None:
    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if len(layers) <= count:
        return

    def watch(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        if inputs[0].requires_grad:
            inputs[0].register_hook(lambda _: do())

    layers[-count].register_forward_pre_hook(watch)


class _Storages(TorchDispatchMode):
    """Counts the bytes of all storages that come into being within it, as long as each is there."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Give parameters a gradient. Both are no part of the count."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._before = set()
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.requires_grad:
                tensor.grad = torch.zeros_like(tensor)
                self._before.add(_address(part_of(tensor.grad).untyped_storage()))
            self._before.add(_address(part_of(tensor).untyped_storage()))
        self._sizes: dict[int, int] = {}  # by address of the storage
        self._held = self.peak = self.first_peak = 0

    def begin_second_part(self) -> None:
        self.first_peak, self.peak = max(self.first_peak, self.peak), self._held

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if call is torch.ops.aten.add.Tensor and not kwargs and _is_sum_of_gradients(*args):
            call = torch.ops.aten.add_.Tensor
        if str(call) == _PRODUCT_OVER_EXPERTS and args[0].dtype is torch.float32:
            result = call(*(_in_bfloat16(arg) for arg in args), **(kwargs or {})).to(torch.float32)
        else:
            result = call(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        address = _address(storage)
        if address in self._before:
            return
        if address not in self._sizes:
            self._sizes[address] = 0
            weakref.finalize(storage, self._release, address)
        self._held += storage.nbytes() - self._sizes[address]
        self._sizes[address] = storage.nbytes()
        self.peak = max(self.peak, self._held)

    def _release(self, address: int) -> None:
        self._held -= self._sizes.pop(address)

    def __enter__(self) -> _Storages:
        """FSDP2 resizes the storages of gathered layers, which is no operation that a mode could see.

        torch's own tracker replaces the same method (torch/distributed/_tools/mem_tracker.py).
        """
        self._resize = resize = torch.UntypedStorage.resize_

        def counted(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            self._count(storage)

        torch.UntypedStorage.resize_ = counted  # type: ignore[assignment,method-assign]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)  # type: ignore[no-untyped-call]


def _in_bfloat16(argument: Any) -> Any:
    """Return a product's argument in the only dtype for which torch tells the shape of products over experts."""
    is_matrix = isinstance(argument, Tensor) and argument.is_floating_point()
    return argument.to(torch.bfloat16) if is_matrix else argument


def _address(storage: torch.UntypedStorage) -> int:
    return int(storage._cdata)  # noqa: SLF001 - nothing else tells storages without memory apart


def _is_sum_of_gradients(one: Any, other: Any) -> bool:
    """Return True for a sum that autograd makes in place if no mode watches (torch/csrc/autograd/input_buffer.cpp)."""
    return (
        not torch.is_grad_enabled()
        and isinstance(one, Tensor)
        and isinstance(other, Tensor)
        and (one.shape, one.dtype) == (other.shape, other.dtype)
        and one.is_contiguous()
    )


@contextlib.contextmanager
def _pretending_ranks(count: int) -> Iterator[None]:
    if count == 1:
        yield
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        with pretended_mesh(count):
            yield
    finally:
        dist.destroy_process_group()
