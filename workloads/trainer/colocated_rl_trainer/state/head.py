"""Compute log-probability and entropy of tokens from the last hidden states, without the logits of all tokens at once.

Logits are computed for a part of the vocabulary at a time, and again in the backward pass, as in Wijmans et al. 2024
(Cut Your Losses in Large-Vocabulary Language Models). Parts of the vocabulary and not of the tokens, so that the
gradient of the head is written in place and summed over all tokens by one product. `linear_cross_entropy` of torch 2.13
has no entropy, and no softcap.

The head must be a linear layer, whose output may be scaled or capped as in `LogitForm`. Whether it is follows from
the model's own forward pass, run over a stand-in for layers and head. Any other model computes whole logits, with a
warning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from colocated_rl_api.logs import log

PARTS = 16  # of the vocabulary: each takes 14 bytes a logit at most, and all logits in float32 take 4
_LEAST, _MOST = 2**18, 2**26  # logits of a part; fewer are not worth a kernel, more would not be faster

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class LogitForm:
    """The form of logits is cap * tanh(product * scale / cap), of the products of hidden states and head."""

    scale: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, config: Any) -> LogitForm:
        """Return the form in the config, in the words of Gemma, Cohere and Granite."""
        scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1.0)
        return cls(scale=scale, cap=getattr(config, "final_logit_softcapping", None))

    def apply_in_place(self, products: Tensor) -> Tensor:
        if self.scale != 1:
            products.mul_(self.scale)
        if self.cap is not None:
            products.div_(self.cap).tanh_().mul_(self.cap)
        return products

    def slope_in_place(self, gradient: Tensor, logits: Tensor) -> Tensor:
        """Turn the gradient of logits into that of the products. `logits` is used up."""
        if self.cap is not None:
            gradient.mul_(logits.div_(self.cap).square_().neg_().add_(1))
        return gradient.mul_(self.scale) if self.scale != 1 else gradient


@dataclass(frozen=True)
class _Task:
    """A task holds what the logits of a pass are made with."""

    form: LogitForm
    temperature: float
    dtype: torch.dtype  # of the head's weights as an engine has them; those of a trainer may be more exact

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return logits before the temperature: float32 [tokens, part], nobody else's memory."""
        products = linear(hidden, weight, None if bias is None else bias.to(weight.dtype))
        return self.form.apply_in_place(products.float())

    def parts(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Iterator[_Rows]:
        vocabulary, tokens = len(weight), max(1, len(hidden))
        width = min(max(-(-vocabulary // PARTS), _LEAST // tokens), max(1, _MOST // tokens))
        for start in range(0, vocabulary, width):
            end = min(start + width, vocabulary)
            rows = weight[start:end].to(self.dtype).to(hidden.dtype)
            yield _Rows(start, end, rows, None if bias is None else bias[start:end])


@dataclass(frozen=True)
class _Rows:
    """Holds rows `start` to `end` of the head."""

    start: int
    end: int
    weight: Tensor
    bias: Tensor | None

    def places(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return which targets are in this part, bool [tokens], and the place of each in it, [tokens, 1]."""
        return (targets >= self.start) & (targets < self.end), (targets - self.start).clamp(
            0, self.end - self.start - 1
        )[:, None]


class _TokenLogp(torch.autograd.Function):
    """hidden [tokens, width], weight [vocabulary, width], targets [tokens] -> log-probability, entropy: [tokens]."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, task: _Task
    ) -> tuple[Tensor, Tensor]:
        chosen = torch.zeros(len(hidden), device=hidden.device)
        sums, means = [], []  # of each part: logarithm of the sum of exponentials; mean logit
        for part in task.parts(hidden, weight, bias):
            logits = task.logits(hidden, part.weight, part.bias).div_(task.temperature)
            is_here, place = part.places(targets)
            chosen = torch.where(is_here, logits.gather(1, place)[:, 0], chosen)
            highest = logits.amax(1, keepdim=True)
            share = logits.sub_(highest).exp()
            total = share.sum(1)
            sums.append(total.log() + highest[:, 0])
            means.append(share.mul_(logits).sum(1) / total + highest[:, 0])
            del logits, share
        all_sums = torch.stack(sums)
        total_sum = all_sums.logsumexp(0)
        entropy = total_sum - ((all_sums - total_sum).exp() * torch.stack(means)).sum(0)
        ctx.save_for_backward(hidden, weight, bias, targets, total_sum, entropy)
        ctx.task = task
        ctx.set_materialize_grads(False)
        return chosen - total_sum, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        of_logp, of_entropy = gradients
        hidden, weight, bias, targets, total_sum, entropy = ctx.saved_tensors
        task: _Task = ctx.task
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if needs_hidden else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        grad_bias = torch.empty_like(bias) if needs_bias else None
        for part in task.parts(hidden, weight, bias):
            logits = task.logits(hidden, part.weight, part.bias)
            gradient = (logits / task.temperature).sub_(total_sum[:, None])  # log-probabilities
            if of_entropy is None:
                gradient.exp_().mul_(_column(of_logp))
            else:
                share = gradient.exp()
                gradient.add_(entropy[:, None]).mul_(of_entropy[:, None]).add_(_column(of_logp)).mul_(share)
                del share
            gradient.neg_()
            if of_logp is not None:
                is_here, place = part.places(targets)
                gradient.scatter_add_(1, place, torch.where(is_here, of_logp, 0.0)[:, None])
            gradient.div_(task.temperature)
            products = task.form.slope_in_place(gradient, logits).to(hidden.dtype)
            del gradient, logits
            if grad_hidden is not None:
                grad_hidden += products @ part.weight
            if grad_weight is not None:
                grad_weight[part.start : part.end] = products.t() @ hidden
            if grad_bias is not None:
                grad_bias[part.start : part.end] = products.float().sum(0)
        return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight, grad_bias, None, None


def _column(gradient: Tensor | None) -> Tensor | float:
    return 0.0 if gradient is None else gradient[:, None]


class ScoringForward:
    """Runs a model's forward pass, which with `targets` returns log-probabilities and entropies in place of logits.

    It replaces `forward` of the model and of its head, so that ranks that share them gather what it needs.
    """

    def __init__(self, model: PreTrainedModel, form: LogitForm) -> None:
        self._model, self._form = model, form
        self._forward: Callable[..., Any] = model.forward
        self._head: Any = model.get_output_embeddings()
        self._project: Callable[..., Any] = self._head.forward
        model.forward = self
        self._head.forward = self._of_hidden

    def __call__(self, *inputs: Any, targets: Tensor | None = None, **options: Any) -> Any:
        """Compute a pass. targets: int64 [selected], the tokens that are predicted. For these also:

        positions: int64 [kept]; predicts: bool [rows, kept]; temperature; dtype, float32_head: as of `_of_hidden`.
        """
        if targets is None:
            return self._forward(*inputs, **options)
        positions, predicts = options.pop("positions"), options.pop("predicts")
        of_head = {name: options.pop(name) for name in ("temperature", "dtype", "float32_head")}
        hidden = self._model.base_model(*inputs, **options).last_hidden_state
        return self._head(hidden[:, positions][predicts], targets=targets, **of_head)

    def _of_hidden(
        self,
        hidden: Tensor,
        *,
        targets: Tensor | None = None,
        temperature: float = 1.0,
        dtype: torch.dtype = torch.float32,
        float32_head: bool = False,
    ) -> Any:
        """Apply the head. dtype: of an engine's head. float32_head: products are computed in float32 all the same."""
        if targets is None:
            return self._project(hidden)
        task = _Task(self._form, temperature, dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            hidden = hidden.to(torch.float32 if float32_head else dtype)
            return _TokenLogp.apply(hidden, self._head.weight, self._head.bias, targets, task)  # type: ignore[no-untyped-call]


def score_without_logits(model: PreTrainedModel) -> None:
    """Let the model's forward pass compute log-probabilities from hidden states, where its head is understood."""
    form = form_of_logits(model)
    if form is not None:
        ScoringForward(model, form)
    else:
        log(
            _LOG,
            "whole logits computed",
            logging.WARNING,
            model=type(model).__name__,
            reason="its head is more than a linear layer with a scale and a cap",
        )


def form_of_logits(model: PreTrainedModel) -> LogitForm | None:
    """Return what the model makes of the products of hidden states and head; None if it is more than `LogitForm`."""
    form = LogitForm.of(model.config.get_text_config())
    return form if _is_head_of(model, form) else None


def _is_head_of(model: PreTrainedModel, form: LogitForm) -> bool:
    """Return True if the model's logits are hidden states times its head in this form, and nothing else."""
    head: Any = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or model.base_model is model:  # Llama 4's layers have another name than it says
        return False
    hidden = torch.linspace(-50, 50, 12).view(1, 3, 4)
    with _standing_in(model.base_model, hidden), _standing_in(head, None), torch.no_grad():
        try:
            logits = model(input_ids=torch.zeros(1, 3, dtype=torch.int64), use_cache=False).logits
        except (AttributeError, RuntimeError, TypeError):  # it looks at more of its layers than their output
            return False
    scored = form.apply_in_place(hidden.clone())
    return logits.shape == scored.shape and torch.allclose(logits, scored)


class _LayersOutput:
    """A model's layers return this, without caches, attentions and all the rest that an architecture may name."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, _: int) -> Tensor:
        return self.last_hidden_state

    def __getattr__(self, _: str) -> None:
        return None


@contextmanager
def _standing_in(module: Any, output: Tensor | None) -> Iterator[None]:
    """Let a module return `output`, or its input if there is none."""
    own = module.__dict__.get("forward")
    if output is None:
        module.forward = lambda given: given
    else:
        module.forward = lambda *_, **__: _LayersOutput(output)
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own
