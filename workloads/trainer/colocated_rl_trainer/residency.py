"""Where a rank's training state lives: parameters, gradients and optimizer moments, each one flat float32 buffer.

A model's parameters become views of the first buffer and their gradients views of the second, so one copy moves a kind
of state between device and host, one collective sums a gradient, and one fused kernel updates everything. Off the
device, parameters and moments stand in pinned host memory and gradients nowhere: they are zero between steps.

On the CPU device and host are the same memory, and both moves change nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

_EPSILON = 1e-8  # of AdamW


class Residency:
    """The state of one model and its AdamW, on the host or on the device.

    Invariant: between calls, every parameter of the model is a view of `parameters`, and while on the device its
    gradient is a view of `gradients`.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        """Takes the model's parameters over, on the host, whatever they were before."""
        self.device = device
        self._must_move = device.type != "cpu"  # device and host are different memory
        self._trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._rest = [tensor for tensor in _all_tensors(model) if not tensor.requires_grad]
        size = sum(parameter.numel() for parameter in self._trained.values())
        self.parameters = self._host_buffer(size)
        self.first_moment = self._host_buffer(size)
        self.second_moment = self._host_buffer(size)
        self.gradients = torch.empty(0)
        self.updates = 0  # optimizer calls so far, for the bias correction of the moments
        self._host = (self.parameters, self.first_moment, self.second_moment)
        self._host_rest = [tensor.data for tensor in self._rest]
        for parameter, view in zip(self._trained.values(), self._views(self.parameters), strict=True):
            view.copy_(parameter.data)
            parameter.data = view  # one by one: each old tensor is freed before the next is copied
        self.is_onloaded = not self._must_move
        if self.is_onloaded:
            self._make_gradients()

    def onload(self) -> None:
        """Bring everything to the device and make the gradients there, zero."""
        if self.is_onloaded:
            return
        self._place(*(buffer.to(self.device, non_blocking=True) for buffer in self._host))
        for tensor, host in zip(self._rest, self._host_rest, strict=True):
            tensor.data = host.to(self.device, non_blocking=True)
        self._make_gradients()
        torch.cuda.synchronize(self.device)
        self.is_onloaded = True

    def offload(self) -> None:
        """Bring everything to host memory and give the device's back to the driver."""
        if not (self._must_move and self.is_onloaded):
            return
        for host, buffer in zip(self._host, (self.parameters, self.first_moment, self.second_moment), strict=True):
            host.copy_(buffer, non_blocking=True)
        torch.cuda.synchronize(self.device)  # before a device buffer is freed
        self._place(*self._host)
        for tensor, host in zip(self._rest, self._host_rest, strict=True):
            tensor.data = host
        for parameter in self._trained.values():
            parameter.grad = None
        self.gradients = torch.empty(0)
        torch.cuda.empty_cache()
        self.is_onloaded = False

    def update(self, *, learning_rate: float, betas: tuple[float, float], weight_decay: float) -> None:
        """One AdamW call with the gradients as they stand; then they are zero. Source: Loshchilov and Hutter 2019."""
        calls_before = torch.tensor(float(self.updates), device=self.parameters.device)
        adamw(
            [self.parameters], [self.gradients], [self.first_moment], [self.second_moment], [], [calls_before],
            lr=learning_rate, beta1=betas[0], beta2=betas[1], weight_decay=weight_decay, eps=_EPSILON,
            amsgrad=False, maximize=False, fused=True,
        )  # fmt: skip
        self.updates += 1
        self.gradients.zero_()

    def named(self, buffer: Tensor) -> dict[str, Tensor]:
        """Views of one of the buffers by parameter name."""
        return dict(zip(self._trained, self._views(buffer), strict=True))

    def _place(self, parameters: Tensor, first_moment: Tensor, second_moment: Tensor) -> None:
        self.parameters, self.first_moment, self.second_moment = parameters, first_moment, second_moment
        for parameter, view in zip(self._trained.values(), self._views(parameters), strict=True):
            parameter.data = view

    def _make_gradients(self) -> None:
        self.gradients = torch.zeros_like(self.parameters)
        for parameter, view in zip(self._trained.values(), self._views(self.gradients), strict=True):
            parameter.grad = view

    def _views(self, buffer: Tensor) -> Iterator[Tensor]:
        shapes = [parameter.shape for parameter in self._trained.values()]
        for part, shape in zip(buffer.split([shape.numel() for shape in shapes]), shapes, strict=True):
            yield part.view(shape)

    def _host_buffer(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.float32, pin_memory=self._must_move)


def _all_tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()
