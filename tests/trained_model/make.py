"""Write a trained public model, SmolLM2-135M-Instruct, as a directory in Hugging Face format.

    python tests/trained_model/make.py FOLDER OUT

FOLDER: the package in requirements.txt, which holds the model as a GGUF file in 4 bits (Apache-2.0). OUT:
bfloat16 safetensors, tokenizer and chat template. A random model hides what only a trained one shows: logits that are
large, weights of very different sizes, text that a person can read.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def make(folder: Path, out: Path) -> None:
    config = LlamaConfig(**load_gguf_checkpoint(str(folder / FILE))["config"], dtype="bfloat16")
    with torch.device("meta"):
        names = LlamaForCausalLM(config)
    tensors = load_gguf_checkpoint(str(folder / FILE), return_tensors=True, model_to_load=names)["tensors"]
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:  # tied to the embedding
        raise SystemExit(f"{FILE} does not hold the model: {missing} are missing, {unexpected} unexpected")
    model.tie_weights()
    model.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # pods read it as other users
    AutoTokenizer.from_pretrained(folder, gguf_file=FILE).save_pretrained(out)


if __name__ == "__main__":
    make(*map(Path, sys.argv[1:]))
