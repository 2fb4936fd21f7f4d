"""The workload of `make bench-benefit`: lengths of a reasoning model, and rewards that wait.

Lengths are the model's own choice: it samples a state with its first token, and in each state it ends a response with
another probability. So whoever samples from it, an engine or transformers, has the same distribution, and no request
carries a length. The three states fit a sixteenth of the lengths in `bench.traces`.

Its attention and MLPs are computed as in any model of its shape and add nothing: their output matrices are zero. So the
distribution stays what it is while training, at a learning rate that does not move it, computes all that it has to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM


@dataclass(frozen=True)
class LengthState:
    """Describes some of the responses: their share, and their mean tokens before the limit."""

    share: float
    mean: float


STATES = (LengthState(0.70, 45), LengthState(0.22, 130), LengthState(0.08, 420))
WORDS = 64  # of each state
END, START, FIRST = 1, 2, 3  # tokens: end of a response, end of a prompt, first word of the first state
VOCABULARY = FIRST + WORDS * len(STATES)
PEAK = 20.0  # logit of a state's words in that state; of all others 0
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}go"
POSITIONS = 4096


def write_model(directory: Path, *, hidden: int = 128, layers: int = 4) -> Path:
    """Write it in Hugging Face format, with its tokenizer and chat template."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=hidden // 4, max_position_embeddings=POSITIONS,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=END, pad_token_id=0,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        begins = len(STATES)  # the direction of a prompt's end
        embedded, head = model.model.embed_tokens.weight, model.lm_head.weight
        embedded.zero_()
        head.zero_()
        embedded[START, begins] = 1.0
        for number, state in enumerate(STATES):
            words = slice(FIRST + WORDS * number, FIRST + WORDS * (number + 1))
            embedded[words, number] = 1.0
            head[words, number] = PEAK
            head[words, begins] = PEAK + math.log(state.share)
            head[END, number] = PEAK + math.log(WORDS) - math.log(state.mean - 1)
        head /= math.sqrt(hidden)  # the length of a normed direction
    model.save_pretrained(directory)
    names = {"<pad>": 0, "<end>": END, "go": START} | {f"w{number}": number for number in range(FIRST, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(names, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>", chat_template=TEMPLATE
    ).save_pretrained(directory)
    return directory


def question(number: int) -> str:
    """Return a prompt without its end, which the chat template adds."""
    return " ".join(f"w{FIRST + (number * step) % (VOCABULARY - FIRST)}" for step in (1, 7, 11, 13))
