"""Devices that models need for training, by the trainer's own budget: the table of docs/sizing.md.

`python -m bench.sizes` writes it again. Nothing is measured, and no weight is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from colocated_rl_trainer.grpo.budget import Budget, gib
from colocated_rl_trainer.state.rehearsal import Pass, pass_bytes

PAGE = Path("docs/sizing.md")
HEAD = "| model | parameters | devices of 80 GB | of each | devices of 141 GB | of each | host memory of a pod of 8 |"
TOKENS = 16_384  # microBatchTokens
MEMORY = {"80 GB": 79.1, "141 GB": 139.8}  # GiB that the driver tells of H100 and H200
FILLED = 0.9  # of a device: the rest is for contexts, communicators and the gaps of the allocator
MOST = 64

_QWEN3 = {"model_type": "qwen3", "head_dim": 128, "vocab_size": 151_936}
_QWEN2 = {"model_type": "qwen2", "vocab_size": 152_064}
_LLAMA = {"model_type": "llama", "vocab_size": 128_256}


def _shape(width: int, inner: int, layers: int, heads: int, shared_heads: int, **others: Any) -> dict[str, Any]:
    return {
        "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": shared_heads, "tie_word_embeddings": False,
    } | others  # fmt: skip


EXPERTS = {"model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
MODELS: dict[str, dict[str, Any]] = {  # from their config.json
    "Qwen3-0.6B": _QWEN3 | _shape(1024, 3072, 28, 16, 8, tie_word_embeddings=True),
    "Qwen2.5-1.5B": _QWEN2 | _shape(1536, 8960, 28, 12, 2, tie_word_embeddings=True, vocab_size=151_936),
    "Qwen3-4B": _QWEN3 | _shape(2560, 9728, 36, 32, 8, tie_word_embeddings=True),
    "Qwen2.5-7B": _QWEN2 | _shape(3584, 18_944, 28, 28, 4),
    "Qwen3-14B": _QWEN3 | _shape(5120, 17_408, 40, 40, 8),
    "Qwen3-32B": _QWEN3 | _shape(5120, 25_600, 64, 64, 8),
    "Qwen3-30B-A3B": _QWEN3 | _shape(2048, 6144, 48, 32, 4) | EXPERTS,
    "Llama-3.1-70B": _LLAMA | _shape(8192, 28_672, 80, 64, 8),
}


def row(name: str) -> str:
    config = AutoConfig.for_model(**MODELS[name])
    with torch.device("meta"):
        parameters = sum(tensor.numel() for tensor in AutoModelForCausalLM.from_config(config).parameters())
    cells = [name, f"{parameters / 1e9:.1f} billion"]
    for has in MEMORY.values():
        devices, budget = next(_fitting(config, parameters, has * 2**30))
        assert budget.device is not None
        cells += [str(devices), gib(budget.device)]
    pod = Budget.of(
        parameters, on_cpu=False, shared_by=max(8, devices), ranks_in_pod=8, export_bytes=2 * parameters
    )  # of the larger devices
    return f"| {' | '.join([*cells, gib(pod.host)])} |"


def _fitting(config: PreTrainedConfig, parameters: int, has: float) -> Iterator[tuple[int, Budget]]:
    """Yield numbers of devices that are enough, the smallest first."""
    for devices in (2**power for power in range(MOST.bit_length())):
        state = Budget.of(parameters, on_cpu=False, shared_by=devices)
        assert state.device is not None
        if state.device < FILLED * has:
            largest = pass_bytes(config, Pass(TOKENS, torch.bfloat16, shared_by=devices, recomputes=True))
            assert largest is not None
            if state.device + largest < FILLED * has:
                yield devices, Budget.of(parameters, on_cpu=False, shared_by=devices, one_pass=largest)


def main() -> None:
    before, _, after = PAGE.read_text().partition(HEAD)
    rows = [HEAD, "|" + "---|" * (HEAD.count("|") - 1), *map(row, MODELS)]
    PAGE.write_text(before + "\n".join(rows) + after[after.index("\n\n") :])


if __name__ == "__main__":
    main()
