"""Replay routers: in a mixture of experts each token goes to the experts that the engine chose for it.

An engine and a trainer round differently. Where two experts of a layer are nearly as good, one may choose the first and
the other the second, and the token's log-probabilities differ by much more than rounding. So the engine reports its
choice, batches carry it, and training repeats it. The weights of the chosen experts are still computed here, from this
model's router, so the router learns: its softmax, taken at the engine's choice. Source: Ma et al. 2025
(arXiv:2510.11370), where this is called R3.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from colocated_rl_trainer.protocol.settings import ConfigError

_LAYER = re.compile(r"\.layers\.(\d+)\.")
_ROWS = 8  # of hidden states, to learn how a router computes


class RouterReplay:
    """Replays choices of experts in one model.

    width: how many experts a token has in all layers; experts: how many a layer has.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Find the routers of a model. Raises ConfigError if it has none, or others than are understood."""
        config: Any = model.config.get_text_config()
        routers = {name: module for name, module in model.named_modules() if type(module).__name__.endswith("Router")}
        if not routers:
            raise ConfigError(
                f"routerReplay in spec.rollout: {type(model).__name__} has no router of experts: leave it out"
            )
        self._chosen: Tensor | None = None
        for name, router in routers.items():
            normalizes, layer = _normalizes(type(router), config), _LAYER.search(name)
            if normalizes is None or layer is None:
                raise ConfigError(
                    f"routerReplay in spec.rollout: a {type(router).__name__} chooses experts in a way that can't be "
                    "replayed yet: leave it out"
                )
            router.register_forward_hook(partial(self._replay, layer=int(layer[1]), normalizes=normalizes))
        self.width: int = config.num_hidden_layers * router.top_k  # an engine reports dense layers too
        self.experts: int = router.num_experts
        self._layers: int = config.num_hidden_layers

    @contextmanager
    def of(self, chosen: Tensor) -> Iterator[None]:
        """Replay these choices in each pass, forward and backward.

        chosen: int16 [positions, width], of the positions of a pass, row by row; -1: the router chooses.
        """
        self._chosen = chosen.long().unflatten(1, (self._layers, -1))
        try:
            yield
        finally:
            self._chosen = None

    def _replay(
        self, _: nn.Module, __: object, output: tuple[Tensor, Tensor, Tensor], *, layer: int, normalizes: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the router returns: logits, the weight of each chosen expert, and the chosen experts."""
        if self._chosen is None:
            return output
        logits, weights, own = output
        given = self._chosen[:, layer].to(own.device)
        chosen = torch.where(given < 0, own, given)
        return logits, _weights(logits, chosen, normalizes=normalizes).to(weights.dtype), chosen


def _weights(logits: Tensor, chosen: Tensor, *, normalizes: bool) -> Tensor:
    found = torch.softmax(logits, dim=-1, dtype=torch.float32).gather(-1, chosen)
    return found / found.sum(dim=-1, keepdim=True) if normalizes else found


def _normalizes(kind: type[nn.Module], config: Any) -> bool | None:
    """Return whether a router's weights of the chosen experts add up to 1; None if they are no part of a softmax.

    It follows from the router's own forward pass, of a small one with random weights.
    """
    small = copy.deepcopy(config)
    small.hidden_size = _ROWS
    random = torch.Generator().manual_seed(0)
    try:
        with torch.device("cpu"):
            router: Any = kind(small)
            for parameter in router.parameters():
                parameter.data.normal_(generator=random)
            with torch.no_grad():
                logits, weights, chosen = router(torch.randn(_ROWS, _ROWS, generator=random))
        for normalizes in (True, False):
            if torch.allclose(weights, _weights(logits, chosen, normalizes=normalizes), rtol=1e-4):
                return normalizes
    except (AttributeError, RuntimeError, TypeError, ValueError):  # it is made or called in another way
        pass
    return None
