"""Where a rank's training state lives: parameters, gradients and optimizer moments, each one flat float32 buffer.

A model's parameters become views of the first buffer and their gradients views of the second, so one copy moves a kind
of state between device and host, one collective sums a gradient, and one fused kernel updates everything. Off the
device, parameters and moments stand in pinned host memory and gradients nowhere: they are zero between steps.

A frozen reference is a second set of parameters, on the host: when it has to compute, before a step, it stands in the
device buffer of the gradients, which are zero then. So it costs no memory on the device.

On the CPU device and host are the same memory, and both moves change nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

_EPSILON = 1e-8  # of AdamW


class Residency:
    """The state of one model and its AdamW, on the host or on the device.

    Invariants between calls: every trained parameter of the model is a view of `parameters`, and while onloaded its
    gradient is a view of `gradients`.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, *, moves: bool | None = None, with_moments: bool = True
    ) -> None:
        """Take the model's parameters over, on the host. moves: device and host are different memory.

        with_moments: for AdamW; without, an update is plain SGD.
        """
        self._device = device
        self._moves = device.type != "cpu" if moves is None else moves
        self._trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._fixed = [tensor for tensor in chain(model.parameters(), model.buffers()) if not tensor.requires_grad]
        size = sum(parameter.numel() for parameter in self._trained.values())
        self.parameters, self.first_moment, self.second_moment = self._host = tuple(
            torch.zeros(length, dtype=torch.float32, pin_memory=device.type == "cuda")
            for length in (size, *(2 * [size if with_moments else 0]))
        )
        self._host_fixed = [tensor.data for tensor in self._fixed]
        self.updates = 0  # optimizer calls so far, for the bias correction of the moments
        for parameter, view in zip(self._trained.values(), self._views(self.parameters), strict=True):
            view.copy_(parameter.data)
            parameter.data = view  # one by one: each old tensor is freed before the next is copied
        self.gradients = torch.empty(0)
        self._reference = torch.empty(0)
        self.is_onloaded = not self._moves
        if self.is_onloaded:
            self._make_gradients()

    def onload(self) -> None:
        """Bring everything to the device and make the gradients there, zero."""
        if self.is_onloaded:
            return
        self._place(*(buffer.to(self._device, non_blocking=True, copy=True) for buffer in self._host))
        for tensor, host in zip(self._fixed, self._host_fixed, strict=True):
            tensor.data = host.to(self._device, non_blocking=True)
        self._make_gradients()
        self._wait_for_copies()
        self.is_onloaded = True

    def offload(self) -> None:
        """Bring everything to host memory and give the device's back to the driver."""
        if not (self._moves and self.is_onloaded):
            return
        for host, buffer in zip(self._host, (self.parameters, self.first_moment, self.second_moment), strict=True):
            host.copy_(buffer, non_blocking=True)
        self._wait_for_copies()  # before a device buffer is freed
        self._place(*self._host)
        for tensor, host in zip(self._fixed, self._host_fixed, strict=True):
            tensor.data = host
        for parameter in self._trained.values():
            parameter.grad = None
        self.gradients = torch.empty(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        self.is_onloaded = False

    def update(self, *, learning_rate: float, betas: tuple[float, float], weight_decay: float) -> None:
        """One call of AdamW, or of SGD, with the gradients as they stand; then they are zero.

        Weight decay is decoupled from the gradient. Source: Loshchilov and Hutter 2019.
        """
        if len(self.first_moment):
            calls_before = torch.tensor(float(self.updates), device=self.parameters.device)
            adamw(
                [self.parameters], [self.gradients], [self.first_moment], [self.second_moment], [], [calls_before],
                lr=learning_rate, beta1=betas[0], beta2=betas[1], weight_decay=weight_decay, eps=_EPSILON,
                amsgrad=False, maximize=False, fused=True,
            )  # fmt: skip
        else:
            self.parameters.mul_(1 - learning_rate * weight_decay).sub_(self.gradients, alpha=learning_rate)
        self.updates += 1
        self.gradients.zero_()

    def keep_reference(self, model: nn.Module) -> None:
        """Copy the reference's parameters, on the host, from a model of the same shape."""
        reference = torch.empty_like(self._host[0], pin_memory=self._device.type == "cuda")
        for name, view in self.named(reference).items():
            view.copy_(model.get_parameter(name).data)
        self._reference = reference

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """Inside, the model computes as the reference. For no gradient, and between steps: gradients are zero."""
        self.gradients.copy_(self._reference, non_blocking=True)
        self._point_at(self.gradients)
        try:
            yield
        finally:
            self._point_at(self.parameters)
            self.gradients.zero_()

    @property
    def moments(self) -> dict[str, Tensor]:
        """The optimizer's buffers by kind; none for SGD."""
        kinds = {"first_moment": self.first_moment, "second_moment": self.second_moment}
        return {kind: buffer for kind, buffer in kinds.items() if len(buffer)}

    def named(self, buffer: Tensor) -> dict[str, Tensor]:
        """Views of one of the buffers by parameter name."""
        return dict(zip(self._trained, self._views(buffer), strict=True))

    def _place(self, parameters: Tensor, first_moment: Tensor, second_moment: Tensor) -> None:
        self.parameters, self.first_moment, self.second_moment = parameters, first_moment, second_moment
        self._point_at(parameters)

    def _point_at(self, buffer: Tensor) -> None:
        for parameter, view in zip(self._trained.values(), self._views(buffer), strict=True):
            parameter.data = view

    def _make_gradients(self) -> None:
        self.gradients = torch.zeros_like(self.parameters)
        for parameter, view in zip(self._trained.values(), self._views(self.gradients), strict=True):
            parameter.grad = view

    def _views(self, buffer: Tensor) -> Iterator[Tensor]:
        shapes = [parameter.shape for parameter in self._trained.values()]
        for part, shape in zip(buffer.split([shape.numel() for shape in shapes]), shapes, strict=True):
            yield part.view(shape)

    def _wait_for_copies(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
