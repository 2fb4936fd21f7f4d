"""Exports that the real engine can load: a random Qwen3, or Qwen3 of experts, with a tokenizer of its own.

Needs torch and transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3MoeConfig

from colocated_rl_api.rungs import WeightVersion
from colocated_rl_api.weights import Probe
from colocated_rl_trainer.protocol.manifest import Exported, write_manifest

PROBE = tuple(range(5, 29))
VOCABULARY = 300
CONTEXT = 4096
LAYERS = 2
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": CONTEXT,
    "initializer_range": 0.1, "tie_word_embeddings": True, "bos_token_id": None,
}  # fmt: skip
EXPERTS_OF_TOKEN = 2
EXPERTS = {
    "num_experts": 8, "num_experts_per_tok": EXPERTS_OF_TOKEN, "moe_intermediate_size": 32, "norm_topk_prob": True,
    "tie_word_embeddings": False,  # the engine's Qwen3 of experts ties none, whatever the config says
}  # fmt: skip


def write_engine_export(
    directory: Path, *, version: WeightVersion, seed: int, mixture: bool = False, norms: float = 1.0
) -> Path:
    """float32, with the log-probabilities of PROBE as transformers computes them. norms: weight of each."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen3MoeConfig(**SHAPE | EXPERTS, **ends) if mixture else Qwen3Config(**SHAPE, **ends)
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.fill_(norms)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    with torch.no_grad():
        logp = torch.log_softmax(model(torch.tensor([PROBE])).logits[0, :-1], dim=-1)
    found = logp.gather(1, torch.tensor(PROBE[1:]).unsqueeze(1)).squeeze(1)
    write_manifest(directory, version, Exported(Probe(input_ids=PROBE, logp=tuple(found.tolist()))))
    return directory


def make_tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    )
    core.train_from_iterator(["zero one two three four five six seven eight nine ten plus minus is what"] * 20, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return tokenizer
