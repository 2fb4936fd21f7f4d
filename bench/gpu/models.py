"""Models with which switches are shown: shapes of public ones, with random weights made where they are needed."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from bench.gpu.moves import finish
from bench.sizes import MODELS as PUBLIC

TINY = {
    "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 2048, "tie_word_embeddings": True,
}  # fmt: skip
SIDE = {"cpu": 256, "cuda": 8192}  # of the matrices whose product is the peak
PRODUCTS = 10
LEARNING_RATE = 1e-6


@dataclass(frozen=True)
class TrainedModel:
    """A model and how it is trained. samples, length: of a batch, each sample with so many tokens."""

    name: str
    shape: dict[str, Any]
    config: dict[str, Any] = field(default_factory=dict)  # of the trainer
    samples: int = 32
    length: int = 1024

    @property
    def vocabulary(self) -> int:
        return int(self.shape["vocab_size"])

    @property
    def entropy(self) -> float:
        """Return what a token takes by a model of random weights, in nats: any token is as likely as another."""
        return float(torch.tensor(float(self.vocabulary)).log())

    @property
    def flops(self) -> float:
        """Return the work of a training step for one token, of products with weights alone.

        Two for each weight forward and twice as many backward; frozen weights have no gradient of their own.
        """
        with torch.device("meta"):
            net = AutoModelForCausalLM.from_config(AutoConfig.for_model(**self.shape))
        embedded = 0 if self.shape["tie_word_embeddings"] else net.get_input_embeddings().weight.numel()
        weights = int(sum(parameter.numel() for parameter in net.parameters())) - embedded
        return (4.0 if "lora" in self.config else 6.0) * weights


def _trained(name: str, shape: dict[str, Any], config: dict[str, Any], **batch: int) -> TrainedModel:
    options = {"learningRate": LEARNING_RATE, "dtype": "bfloat16"} | config
    return TrainedModel(name, shape, options, **batch)


SMALL = {"samples": 8, "length": 64}
MODELS = {
    model.name: model
    for model in (
        _trained("tiny", TINY, {}, **SMALL),
        _trained("tiny-LoRA", TINY, {"lora": {"rank": 4}}, **SMALL),
        _trained("0.6B", PUBLIC["Qwen3-0.6B"], {}),
        _trained("7B-LoRA", PUBLIC["Qwen2.5-7B"], {"lora": {"rank": 16}}),
        _trained("7B-SGD", PUBLIC["Qwen2.5-7B"], {"optimizer": "SGD"}),
    )
}


def write_model(name: str, directory: Path, device: str) -> None:
    """Write random weights and a tokenizer of numbered words."""
    model = MODELS[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(**model.shape, bos_token_id=None, eos_token_id=1, pad_token_id=0)
    with torch.device(device):
        net = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    net.save_pretrained(directory)
    words = models.WordLevel({f"w{number}": number for number in range(model.vocabulary)}, unk_token="w0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="w1").save_pretrained(directory)


def peak_flops(device: str) -> float:
    """Measure the rate of a large product of matrices in bfloat16: floating-point operations a second."""
    on = torch.device(device)
    side = SIDE[on.type]
    left, right = (torch.randn(side, side, dtype=torch.bfloat16, device=on) for _ in range(2))
    for _ in range(3):
        left @ right
    finish(on)
    began = time.perf_counter()
    for _ in range(PRODUCTS):
        left @ right
    finish(on)
    return PRODUCTS * 2.0 * side**3 / (time.perf_counter() - began)
