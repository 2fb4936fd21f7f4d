"""Hold a rank's training state: parameters, gradients and optimizer moments in float32, and frozen parameters.

A model's parameters are views of one buffer and their gradients views of another, so one copy moves a kind of state
between device and host, one collective sums a gradient, and one fused kernel updates everything. Where ranks share a
model, each parameter is in the buffer that FSDP2 made for it, and every other kind in one buffer, in the same order.
Off the device, parameters and moments are in pinned host memory and gradients nowhere: they are zero between steps.
The device memory is then freed from under the tensors: the tensor objects remain, and nobody may read them.

AdamW can update on the host instead: the moments are then there at all times, and parameters and gradients go through a
buffer on the host, piece by piece. Its kernel is torch's own for CPUs.

Frozen parameters never change, so their host copy is made once, and their way off the device copies nothing.

A frozen reference is a second set of parameters, on the host. When it has to compute, before a step, it takes the place
of the policy's parameters, which wait in the buffer of the gradients, zero then. So it costs no memory on the device.

On the CPU, device and host are the same memory, and both moves change nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from torch.optim.adamw import adamw

from colocated_rl_api.job import TrainerMemory
from colocated_rl_trainer.state.pinned import Cuda, Driver, HostMemory
from colocated_rl_trainer.state.sharding import as_part, part_of

PARAMETERS, GRADIENTS = "parameters", "gradients"
MOMENTS = ("first_moment", "second_moment")
STATE = {  # the kinds of state of each of a job's names
    TrainerMemory.PARAMETERS: (PARAMETERS,),
    TrainerMemory.GRADIENTS: (GRADIENTS,),
    TrainerMemory.OPTIMIZER: MOMENTS,
}

PIECE = 1 << 26  # elements that an update on the host has there at once, twice: 512 MiB

_EPSILON = 1e-8  # of AdamW
_SUMMED = 1 << 18  # elements that a norm adds up at once: a CPU loses 2 % of the sum of 10^8 squares in float32
_ALIGNMENT = 16  # bytes, of any dtype

Blocks = tuple[Tensor, ...]


class Residency:
    """Holds the state of one model and its optimizer, on the host or on the device.

    Invariants between calls: every trained parameter of the model, or this rank's part of it, is a view of `parameters`
    and its gradient one of `gradients`.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        *,
        moves: bool | None = None,
        with_moments: bool = True,
        updates_on_host: bool = False,
        stays: Collection[str] = (),
        driver: Driver | None = None,
    ) -> None:
        """Take over the model's parameters and leave them offloaded. moves: device and host are different memory.

        with_moments: for AdamW; an update is plain SGD without. updates_on_host: by AdamW, where that is other memory.
        stays: kinds that are on the device at all times. driver: pins the copies on the host; CUDA's where the device
        is one of its.
        """
        self._device = device
        self._moves = device.type != "cpu" if moves is None else moves
        self.stays = frozenset(stays)
        self._memory = HostMemory(Cuda() if device.type == "cuda" else driver)
        self._trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._shapes = [part_of(parameter).shape for parameter in self._trained.values()]
        self._buffers = [tensor for tensor in model.buffers() if not isinstance(tensor, DTensor)]
        self._host_buffers = [tensor.data.cpu() for tensor in self._buffers]
        # frozen parameters, each with its copy on the host if it leaves the device
        self._frozen = self._take_frozen([each for each in model.parameters() if not each.requires_grad])
        self.parameters, self._widths = self._take_over()
        size = sum(self._widths)
        self.gradients = torch.zeros(size, device=device)
        kinds = MOMENTS if with_moments else ()
        self._on_host = frozenset(kinds if self._moves and updates_on_host else ())
        self.moments: dict[str, Tensor] = {
            kind: self._host_buffer().zero_() if kind in self._on_host else torch.zeros(size, device=device)
            for kind in kinds
        }
        piece = min(PIECE, max(map(len, self.parameters)))
        self._staged = self._memory.take(2 * piece, torch.float32) if self._on_host else None
        self.updates = 0  # optimizer calls so far, for the bias correction of the moments
        for parameter, view in zip(self._trained.values(), self._views((self.gradients,)), strict=True):
            parameter.grad = as_part(view, parameter)
        self._host = {kind: self._host_buffer() for kind in self._leaving} if self._moves else {}
        self._reference: Tensor | None = None
        self.is_onloaded = True
        self.offload()

    def _take_frozen(self, parameters: Sequence[Tensor]) -> list[tuple[Tensor, Tensor | None]]:
        """Return each one's memory on the device, and its copy on the host if it does not stay on the device."""
        if self._moves:
            for parameter in parameters:
                if not isinstance(parameter, DTensor):
                    parameter.data = parameter.data.to(self._device, copy=True)
        blocks = [_block_of(parameter) for parameter in parameters]
        if not self._moves or PARAMETERS in self.stays:
            return [(block, None) for block in blocks]
        sizes = [-(-block.nbytes // _ALIGNMENT) * _ALIGNMENT for block in blocks]
        copies = self._memory.take(sum(sizes), torch.uint8).split(sizes)
        kept = [copy[: block.nbytes].view(block.dtype) for block, copy in zip(blocks, copies, strict=True)]
        for block, copy in zip(blocks, kept, strict=True):
            copy.copy_(block)
            block.untyped_storage().resize_(0)
        return [*zip(blocks, kept, strict=True)]

    def _take_over(self) -> tuple[Blocks, list[int]]:
        """Return the buffers of the parameters, and how many elements each parameter has in them."""
        trained = self._trained.values()
        if any(isinstance(parameter, DTensor) for parameter in trained):
            blocks = tuple(_block_of(parameter) for parameter in trained)
            return blocks, [len(block) for block in blocks]
        self._widths = [parameter.numel() for parameter in trained]
        block = torch.empty(sum(self._widths), device=self._device)
        for parameter, view in zip(trained, self._views((block,)), strict=True):
            view.copy_(parameter.data)
            parameter.data = view  # one by one: each old tensor is freed before the next is copied
        return (block,), self._widths

    def onload(self) -> None:
        """Copy the state to the device and make gradients there, zero."""
        if self.is_onloaded:
            return
        for kind, blocks in self._leaving.items():
            for block, host in self._beside(blocks, self._host[kind]):
                _take_memory(block)
                block.copy_(host, non_blocking=True)
        if GRADIENTS not in self.stays:
            _take_memory(self.gradients)
            self.gradients.zero_()
        for block, copy in self._frozen:
            if copy is not None:
                _take_memory(block)
                block.copy_(copy, non_blocking=True)
        for tensor, host in zip(self._buffers, self._host_buffers, strict=True):
            tensor.data = host.to(self._device, non_blocking=True)
        self._wait_for_copies()
        self.is_onloaded = True

    def offload(self) -> None:
        """Copy what does not stay to host memory and give the device memory back to the driver."""
        if not (self._moves and self.is_onloaded):
            return
        for kind, blocks in self._leaving.items():
            for block, host in self._beside(blocks, self._host[kind]):
                host.copy_(block, non_blocking=True)
        self._wait_for_copies()  # before a device buffer is freed
        for block in chain.from_iterable(self._leaving.values()):
            block.untyped_storage().resize_(0)
        if GRADIENTS not in self.stays:
            self.gradients.untyped_storage().resize_(0)
        for block, copy in self._frozen:
            if copy is not None:
                block.untyped_storage().resize_(0)
        for tensor, host in zip(self._buffers, self._host_buffers, strict=True):
            tensor.data = host
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        self.is_onloaded = False

    def gradient_norm(self) -> Tensor:
        """Return the norm of this rank's gradients, a scalar."""
        return get_total_norm(self.gradients.split(_SUMMED))

    def update(self, *, learning_rate: float, betas: tuple[float, float], weight_decay: float) -> None:
        """Call AdamW, or SGD, once with the current gradients, and set them to zero.

        Weight decay is decoupled from the gradient. Source: Loshchilov and Hutter 2019.
        """
        gradients = [part for _, part in self._beside(self.parameters, self.gradients)]
        if self._staged is not None:
            self._update_on_host(learning_rate=learning_rate, betas=betas, weight_decay=weight_decay)
        elif self.moments:
            first, second = (
                [part for _, part in self._beside(self.parameters, moment)] for moment in self.moments.values()
            )
            calls_before = torch.full((len(self.parameters),), float(self.updates), device=self._device).unbind()
            _call_adamw(
                self.parameters, gradients, first, second, calls_before,
                learning_rate=learning_rate, betas=betas, weight_decay=weight_decay,
            )  # fmt: skip
        else:
            for block, gradient in zip(self.parameters, gradients, strict=True):
                block.mul_(1 - learning_rate * weight_decay).sub_(gradient, alpha=learning_rate)
        self.updates += 1
        self.gradients.zero_()

    def _update_on_host(self, *, learning_rate: float, betas: tuple[float, float], weight_decay: float) -> None:
        """Call AdamW beside the moments, for PIECE elements at a time, which are copied to the host and back."""
        assert self._staged is not None
        sizes = [len(block) for block in self.parameters]
        others = (buffer.split(sizes) for buffer in (self.gradients, *self.moments.values()))
        for block in zip(self.parameters, *others, strict=True):
            for parameters, gradients, first, second in zip(*(tensor.split(PIECE) for tensor in block), strict=True):
                here, gradient = self._staged[: 2 * len(parameters)].chunk(2)
                here.copy_(parameters, non_blocking=True)
                gradient.copy_(gradients, non_blocking=True)
                self._wait_for_copies()
                _call_adamw(
                    [here], [gradient], [first], [second], [torch.tensor(float(self.updates))],
                    learning_rate=learning_rate, betas=betas, weight_decay=weight_decay,
                )  # fmt: skip
                parameters.copy_(here)  # blocking: the next piece takes this one's place

    def keep_reference(self) -> None:
        """Copy the current parameters to the host, as the reference."""
        self._reference = self._host_buffer()
        for block, reference in self._beside(self._kept_now(PARAMETERS), self._reference):
            reference.copy_(block)

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """Let the model compute as the reference. Use it without gradients, between steps: gradients are zero then."""
        assert self._reference is not None
        for block, aside in self._beside(self.parameters, self.gradients):
            aside.copy_(block)
        for block, reference in self._beside(self.parameters, self._reference):
            block.copy_(reference, non_blocking=True)
        try:
            yield
        finally:
            for block, aside in self._beside(self.parameters, self.gradients):
                block.copy_(aside)
            self.gradients.zero_()

    def named(self, kind: str) -> dict[str, Tensor]:
        """Return this rank's parameters, gradients or a moment by parameter name, in the memory where they are now."""
        blocks = (self.gradients,) if kind == GRADIENTS else self._kept_now(kind)
        views = zip(self._trained.items(), self._views(blocks), strict=True)
        return {name: as_part(view, parameter) for (name, parameter), view in views}

    def saved(self) -> dict[str, Tensor]:
        """Return all that a checkpoint holds, by kind and name, in place: to be written, or to be filled."""
        return {f"{kind}.{name}": view for kind in self._kept for name, view in self.named(kind).items()}

    @property
    def size_bytes(self) -> int:
        """Return the bytes that the state takes on the device."""
        frozen = (block for block, _ in self._frozen)
        kept = (blocks for kind, blocks in self._kept.items() if kind not in self._on_host)
        blocks = (*chain.from_iterable(kept), self.gradients, *frozen)
        return sum(block.element_size() * len(block) for block in blocks)

    @property
    def pageable_bytes(self) -> int:
        """Return the bytes on the host that should be pinned, and are not."""
        return self._memory.pageable_bytes

    @property
    def _kept(self) -> dict[str, Blocks]:
        """Return the buffers of what outlives a step, by kind: on the device, or on the host at all times."""
        return {PARAMETERS: self.parameters} | {kind: (buffer,) for kind, buffer in self.moments.items()}

    @property
    def _leaving(self) -> dict[str, Blocks]:
        return {kind: blocks for kind, blocks in self._kept.items() if kind not in self.stays | self._on_host}

    def _kept_now(self, kind: str) -> Blocks:
        is_there = self.is_onloaded or kind in self.stays | self._on_host
        return self._kept[kind] if is_there else (self._host[kind],)

    def _beside(self, blocks: Sequence[Tensor], buffer: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each block with its part of a buffer of the same size."""
        return zip(blocks, buffer.split([len(block) for block in blocks]), strict=True)

    def _views(self, blocks: Blocks) -> Iterator[Tensor]:
        parts = blocks if len(blocks) == len(self._widths) else blocks[0].split(self._widths)
        for part, shape in zip(parts, self._shapes, strict=True):
            yield part[: shape.numel()].view(shape)

    def _host_buffer(self) -> Tensor:
        return self._memory.take(sum(self._widths), torch.float32)

    def _wait_for_copies(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _call_adamw(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    calls_before: Sequence[Tensor],
    *,
    learning_rate: float,
    betas: tuple[float, float],
    weight_decay: float,
) -> None:
    """Call torch's fused kernel for the device on which all of them are. calls_before: scalars, which it raises."""
    adamw(
        [*parameters], [*gradients], [*first], [*second], [], [*calls_before],
        lr=learning_rate, beta1=betas[0], beta2=betas[1], weight_decay=weight_decay, eps=_EPSILON,
        amsgrad=False, maximize=False, fused=True,
    )  # fmt: skip


def _block_of(parameter: Tensor) -> Tensor:
    """Return the memory of this rank's part, flat. Of a divided parameter it is padded to that of the largest part."""
    part = part_of(parameter)
    return torch.empty(0, dtype=part.dtype, device=part.device).set_(part.untyped_storage())


def _take_memory(block: Tensor) -> None:
    block.untyped_storage().resize_(block.numel() * block.element_size())
