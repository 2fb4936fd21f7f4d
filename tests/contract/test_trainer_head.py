"""Log-probability and entropy without logits: the values, gradients and memory of what is computed with them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from allocations import allocated_by
from contract.test_trainer_sharding import train_one
from contract.trainer_in_process import RankInProcess
from contract.trainer_ranks_in_process import in_ranks
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from colocated_rl_trainer.protocol.settings import ConfigError
from colocated_rl_trainer.state.head import LogitForm, ScoringForward, score_without_logits
from colocated_rl_trainer.state.weights import load_model
from fakes.tiny_model import write_tiny_model

SAME = 1e-5
SMALL: dict[str, Any] = {
    "vocab_size": 53, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
    "initializer_range": 0.3,
}  # fmt: skip
PLAIN = {name: value for name, value in SMALL.items() if name != "head_dim"}
MODELS: dict[str, PreTrainedConfig] = {
    "untied": transformers.Qwen3Config(**SMALL, tie_word_embeddings=False),
    "tied": transformers.Qwen3Config(**SMALL, tie_word_embeddings=True),
    "capped": transformers.Gemma2Config(**SMALL, final_logit_softcapping=2.0),
    "scaled up": transformers.CohereConfig(**PLAIN, logit_scale=0.25),
    "scaled down": transformers.GraniteConfig(**PLAIN, logits_scaling=3.0),
    "with a bias": transformers.PhiConfig(**PLAIN),
    "experts": transformers.Qwen3MoeConfig(**SMALL, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2),
    "old": transformers.GPT2Config(vocab_size=53, n_positions=64, n_embd=32, n_layer=2, n_head=4, eos_token_id=1),
}


def make(config: PreTrainedConfig) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    head = model.get_output_embeddings()
    if head.bias is not None:
        torch.nn.init.normal_(head.bias)
    return model


def selection() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two rows of nine tokens; which positions are kept, which of those predict, and what."""
    torch.manual_seed(1)
    ids = torch.randint(2, 53, (2, 9))
    positions = torch.tensor([1, 2, 4, 5, 7])
    predicts = torch.tensor([[True, True, True, False, True], [False, True, True, True, True]])
    return ids, positions, predicts, ids[:, positions + 1][predicts]


def of_whole_logits(model: Any, temperature: float) -> tuple[Tensor, Tensor]:
    ids, positions, predicts, targets = selection()
    logp = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[:, positions][predicts] / temperature, -1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def of_hidden(model: Any, temperature: float, **options: Any) -> tuple[Tensor, Tensor]:
    ids, positions, predicts, targets = selection()
    of_head = {"temperature": temperature, "dtype": torch.float32, "float32_head": False} | options
    found: tuple[Tensor, Tensor] = model(
        input_ids=ids, use_cache=False, positions=positions, predicts=predicts, targets=targets, **of_head
    )
    return found


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen parts also of a vocabulary of 53, the last one smaller."""
    monkeypatch.setattr("colocated_rl_trainer.state.head._LEAST", 1)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients_are_those_of_whole_logits(name: str, temperature: float) -> None:
    """The sum weights log-probabilities and entropies differently for each token."""
    model = make(MODELS[name])
    results = []
    for compute in (of_whole_logits, of_hidden):
        logp, entropy = compute(model, temperature)
        weights = torch.linspace(-1, 2, len(logp))
        (logp @ weights + 0.3 * entropy @ weights.flip(0)).backward()
        gradients = {key: tensor.grad.clone() for key, tensor in model.named_parameters() if tensor.grad is not None}
        results.append((logp.detach(), entropy.detach(), gradients))
        model.zero_grad()
        score_without_logits(model)
    assert isinstance(model.forward, ScoringForward)

    (logp, entropy, wanted), (our_logp, our_entropy, found) = results
    torch.testing.assert_close(our_logp, logp, rtol=SAME, atol=SAME)
    torch.testing.assert_close(our_entropy, entropy, rtol=SAME, atol=SAME)
    assert wanted.keys() == found.keys()
    norm = torch.stack([tensor.norm() for tensor in wanted.values()]).norm()
    assert norm > 0.1
    for key, tensor in wanted.items():
        assert (found[key] - tensor).norm() < SAME * norm, key


class OddHead(transformers.Qwen3ForCausalLM):  # type: ignore[misc]  # transformers has no types
    """Its logits are something that no config says."""

    def forward(self, *inputs: Any, **options: Any) -> Any:
        found = super().forward(*inputs, **options)
        found.logits = found.logits * 1.5
        return found


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (OddHead, MODELS["tied"]),
        (  # transformers does not find the layers under its head, and the trainer ended in a traceback
            transformers.Llama4ForCausalLM,
            transformers.Llama4TextConfig(**SMALL, intermediate_size_mlp=64, num_local_experts=2),
        ),
    ],
)
def test_model_whose_head_is_more_than_it_seems_computes_whole_logits(
    caplog: pytest.LogCaptureFixture, kind: Any, config: PreTrainedConfig
) -> None:
    model = kind(config)

    with caplog.at_level(logging.WARNING):
        score_without_logits(model)

    assert not isinstance(model.forward, ScoringForward)
    assert ["whole logits computed"] == [record.message for record in caplog.records]


def test_a_head_in_float32_is_refused_where_the_model_computes_its_logits_by_itself(tmp_path: Path) -> None:
    """It was ignored: engines computed logits in float32, and the trainer in bfloat16."""
    config = transformers.Llama4TextConfig(**SMALL, intermediate_size_mlp=64, num_local_experts=2)
    transformers.Llama4ForCausalLM(config).save_pretrained(tmp_path / "model")

    with pytest.raises(ConfigError, match=r"fp32LmHead .* Llama4ForCausalLM computes whole logits"):
        RankInProcess(tmp_path, tmp_path / "model", dtype="bfloat16", fp32LmHead=True)


def test_what_is_no_pass_over_targets_computes_as_before() -> None:
    model = make(MODELS["untied"])
    ids = selection()[0]
    before = model(input_ids=ids).logits
    score_without_logits(model)

    torch.testing.assert_close(model(input_ids=ids).logits, before, rtol=0, atol=0)


def head_peak(form: LogitForm, dtype: torch.dtype, *, tokens: int, vocabulary: int, device: torch.device) -> int:
    """Bytes of log-probability and entropy, forward and backward, beside the gradients of hidden states and head."""
    width = 16
    model = make(transformers.Qwen3Config(**{**SMALL, "vocab_size": vocabulary, "hidden_size": width, "head_dim": 4}))
    head = ScoringForward(model.to(device), form)._of_hidden
    hidden = torch.randn(tokens, width, device=device, requires_grad=True)
    targets = torch.randint(0, vocabulary, (tokens,), device=device)

    def both() -> object:
        logp, entropy = head(hidden, targets=targets, dtype=dtype)
        (logp.sum() + entropy.sum()).backward()
        return logp

    both()  # what is made once has been made
    hidden.grad = None
    model.zero_grad()
    return allocated_by(both, device).peak - 4 * (vocabulary * width + 2 * tokens * width)


@pytest.mark.parametrize("form", [LogitForm(), LogitForm(scale=0.5, cap=30.0)], ids=["plain", "capped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_peak_is_a_quarter_of_the_logits(form: LogitForm, dtype: torch.dtype) -> None:
    """It was four times the logits, forward and backward."""
    tokens, vocabulary = 1024, 8192
    found = head_peak(form, dtype, tokens=tokens, vocabulary=vocabulary, device=torch.device("cpu"))
    assert found < 0.25 * tokens * vocabulary * 4


def test_head_in_float32_rounds_weights_as_an_engine_has_them_and_no_logit() -> None:
    """bfloat16 weights and hidden states, whose products are exact to float32."""
    model = make(MODELS["untied"])
    score_without_logits(model)
    with torch.no_grad():
        ids, positions, predicts, targets = selection()
        hidden = model.base_model(input_ids=ids).last_hidden_state[:, positions][predicts]
        logits = hidden.float() @ model.lm_head.weight.bfloat16().float().t()
        wanted = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
        exact, _ = of_hidden(model, 1.0, dtype=torch.bfloat16, float32_head=True)
        rounded, _ = of_hidden(model, 1.0, dtype=torch.bfloat16)

    torch.testing.assert_close(exact, wanted, rtol=SAME, atol=SAME)
    assert (rounded - wanted).abs().max() > 100 * SAME


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("checkpointing", [True, False], ids=["recomputing", "keeping"])
def test_ranks_that_share_a_head_train_it_as_one_that_has_it(tmp_path: Path, tied: bool, checkpointing: bool) -> None:
    model = write_tiny_model(tmp_path / "model", tied=tied)
    config: dict[str, object] = {"optimizer": "SGD", "learningRate": 1.0, "gradientClip": 1e9}
    (alone,) = in_ranks(1, tmp_path, model, train_one, **config)
    shared, *_ = in_ranks(2, tmp_path, model, train_one, activationCheckpointing=checkpointing, **config)

    assert alone.keys() == shared.keys()
    for name, tensor in alone.items():
        torch.testing.assert_close(torch.tensor(shared[name]), torch.tensor(tensor), rtol=SAME, atol=SAME)


def test_trainers_model_computes_no_whole_logits(tmp_path: Path) -> None:
    trainer = RankInProcess(tmp_path, write_tiny_model(tmp_path / "model"))

    assert isinstance(trainer.loop.model.forward, ScoringForward)
    assert isinstance(load_model(tmp_path / "model").forward, ScoringForward)
