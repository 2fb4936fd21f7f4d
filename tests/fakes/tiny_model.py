"""A random Qwen3 of a few thousand parameters, in Hugging Face format. Needs torch and transformers."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 48


def write_tiny_model(
    directory: Path,
    *,
    seed: int = 0,
    tied: bool = True,
    hidden: int = 32,
    layers: int = 2,
    vocabulary: int = VOCABULARY,
    positions: int = 128,
) -> Path:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=positions,
        initializer_range=0.06,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    words = models.WordLevel({f"w{number}": number for number in range(vocabulary)}, unk_token="w0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="w1").save_pretrained(directory)
    return directory
