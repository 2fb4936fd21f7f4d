"""Models by the shapes of their parameters: those of Qwen2.5, whose weights are random here."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

SHAPES = {
    "tiny": Qwen2Config(
        hidden_size=64, num_hidden_layers=2, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=512, tie_word_embeddings=True,
    ),
    "0.5B": Qwen2Config(
        hidden_size=896, num_hidden_layers=24, intermediate_size=4864, num_attention_heads=14, num_key_value_heads=2,
        vocab_size=151_936, tie_word_embeddings=True,
    ),
    "1.5B": Qwen2Config(
        hidden_size=1536, num_hidden_layers=28, intermediate_size=8960, num_attention_heads=12, num_key_value_heads=2,
        vocab_size=151_936, tie_word_embeddings=True,
    ),
    "7B": Qwen2Config(
        hidden_size=3584, num_hidden_layers=28, intermediate_size=18_944, num_attention_heads=28,
        num_key_value_heads=4, vocab_size=152_064, tie_word_embeddings=False,
    ),
}  # fmt: skip


def shapes_of(name: str) -> dict[str, torch.Size]:
    """Return the shape of each parameter of a model of this size."""
    with torch.device("meta"):
        model = Qwen2ForCausalLM(SHAPES[name])
    return {name: parameter.shape for name, parameter in model.named_parameters()}


class Parameters(nn.Module):
    """Parameters of these shapes that take no memory until somebody takes them over: each is one number, seen often."""

    def __init__(self, shapes: dict[str, torch.Size]) -> None:
        super().__init__()
        for number, shape in enumerate(shapes.values()):
            self.register_parameter(f"p{number}", nn.Parameter(torch.zeros(1).expand(shape)))


def random_tensors(shapes: dict[str, torch.Size], device: torch.device) -> dict[str, Tensor]:
    """Return random tensors in bfloat16, as engines hold them."""
    return {
        name: torch.empty(shape, dtype=torch.bfloat16, device=device).uniform_(-1, 1) for name, shape in shapes.items()
    }
