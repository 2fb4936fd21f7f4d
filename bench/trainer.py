"""`make bench-trainer`: what the trainer's work costs beside the plainest way to do it, on the CPU.

Each figure is a ratio to something that was measured in turn with it, so that both see the same machine:

* an export into shared memory by 1, 2 and 4 ranks, an agent's verification of it and a running engine's load, to a
  plain copy of the same files there (`bench.export`);
* a checkpoint there, to a plain write of the same bytes: written with its digests, verified, and read back;
* a step that two pods keep in memory, and its way back, to plain writes of the same bytes (`bench.mirror`);
* loading a model of bfloat16 in float32, to transformers' own loading of it, and what the memory check before it takes;
* offload and onload of parameters and moments, to a copy of the same bytes;
* an optimization step, to that of trl on the same completions, with as many of them in a forward pass: of all weights
  and of adapters, in float32 and in bfloat16, and by how much the process grows for it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from peers.resident import peak_bytes, resident_bytes
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from bench.export import from_gradient_to_engine
from bench.mirror import beside_plain_writes
from bench.turns import GIB, TURNS, in_turns, show
from colocated_rl_api.checkpoint import checkpoint_name
from colocated_rl_trainer.conformance.ranks import job_file
from colocated_rl_trainer.conformance.shards import Example, write_shards
from colocated_rl_trainer.grpo.loop import GRPOTrainer
from colocated_rl_trainer.protocol.rank import Rank
from colocated_rl_trainer.protocol.settings import RankSettings, TrainerConfig
from colocated_rl_trainer.state.checkpoint import Checkpoints, Saved
from colocated_rl_trainer.state.rehearsal import Pass, pass_bytes
from colocated_rl_trainer.state.residency import Residency
from colocated_rl_trainer.state.sharding import read_parts, write_parts
from colocated_rl_trainer.state.weights import load_model, read_config
from fakes.tiny_model import write_tiny_model
from setup.environments import PEERS
from setup.layout import CHECKOUT
from setup.toolchain import clean_environment

SHARED_MEMORY = Path("/dev/shm")
PARTS = ("export", "checkpoint", "mirror", "load", "moves", "steps")
HIDDEN = 512
VOCABULARY = 32_000  # 62 times the hidden size: Qwen3 has 37 (8B) to 148 (0.6B) times, so logits count as there
STEPS = 3  # of a training run, the first of which is not counted
GROUP_SIZE, ROWS = 8, 4  # samples of a prompt; samples of a forward pass
LENGTHS = {"uniform": [128] * 16, "long tail": [8] * 10 + [32] * 4 + [256] * 2}  # of completions
TRAINED = ("full", "LoRA")
DTYPES = ("float32", "bfloat16")
STEP_S = 900.0


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.trainer", description=__doc__)
    parser.add_argument("--gib", type=float, default=1.1, help="of weights, for all but steps")
    parser.add_argument("--only", choices=PARTS, action="append", help="of the six")
    parser.add_argument("--step", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.step:
        print(json.dumps(train(given.step)))
        return 0
    disable_progress_bar()
    parts = given.only or PARTS
    if "export" in parts:
        with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as shared:
            model = write_tiny_model(Path(shared) / "model")  # for its tokenizer
            make_model(2 * given.gib).to(torch.bfloat16).save_pretrained(model)
            from_gradient_to_engine(model, Path(shared))
    if "checkpoint" in parts:
        with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as shared:
            beside_a_plain_file(make_model(given.gib), Path(shared))
    if "mirror" in parts:
        with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as shared:
            model = write_tiny_model(Path(shared) / "model")  # for its tokenizer
            make_model(given.gib).to(torch.bfloat16).save_pretrained(model)
            beside_plain_writes(model, Path(shared))
    if "load" in parts:
        with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as shared:
            beside_from_pretrained(make_model(given.gib), Path(shared))
    if "moves" in parts:
        beside_a_plain_copy(make_model(given.gib))
    if "steps" in parts:
        for (name, lengths), trained, dtype in product(LENGTHS.items(), TRAINED, DTYPES):
            with tempfile.TemporaryDirectory() as scratch:
                beside_trl(name, lengths, trained, dtype, Path(scratch))
    return 0


def make_model(gib: float) -> Qwen3ForCausalLM:
    """Random weights, in float32."""
    config = Qwen3Config(
        vocab_size=32_000, hidden_size=1024, intermediate_size=4096, num_attention_heads=16, num_key_value_heads=8,
        head_dim=64, num_hidden_layers=max(1, round((gib * GIB / 4 - 32_000 * 1024) / 15.7e6)),
        tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    model.eval()
    return model


# --------------------------------------------------------------------------------------------------------- checkpoints
def beside_a_plain_file(model: Qwen3ForCausalLM, shared: Path) -> None:
    """Parameters and both moments, written and read by one rank; a volume adds its own time."""
    state = {
        f"{kind}.{name}": tensor.detach().clone()
        for name, tensor in model.named_parameters()
        for kind in ("parameters", "moments", "squares")
    }
    size = sum(tensor.nbytes for tensor in state.values())
    flat, plain = torch.zeros(size // 4), shared / "plain"
    (shared / "checkpoints").mkdir()
    checkpoints = Checkpoints(shared / "checkpoints", lineage=1, keep=1)

    def write_plain() -> None:
        with plain.open("wb") as stream:
            stream.write(flat.numpy().data)

    def write() -> None:
        checkpoints.write(1, keep=1, fill=lambda draft: write_parts(state, draft))

    def verify() -> Saved:
        found = checkpoints.newest()
        assert found is not None
        return found

    def read() -> None:
        read_parts(state, shared / "checkpoints" / checkpoint_name(1))

    took = in_turns({"plain": write_plain, "write": write}, before=lambda: plain.unlink(missing_ok=True))
    took |= in_turns({"verify": verify, "read": read})
    print(f"checkpoint of {size / GIB:.2f} GiB in shared memory")
    show("plain write", size, took["plain"])
    show("written, with its digests", size, took["write"], beside=took["plain"])
    show("verified", size, took["verify"])
    show("read", size, took["read"])


# ------------------------------------------------------------------------------------------------------------- loading
def beside_from_pretrained(model: Qwen3ForCausalLM, shared: Path) -> None:
    size = 4 * sum(parameter.numel() for parameter in model.parameters())
    model.to(torch.bfloat16).save_pretrained(shared)
    took = in_turns(
        {
            "plain": lambda: AutoModelForCausalLM.from_pretrained(shared, dtype=torch.float32),
            "load": lambda: load_model(shared),
            "check": lambda: pass_bytes(read_config(shared), Pass(16_384, torch.float32)),
        }
    )
    print(f"load of {size / GIB:.2f} GiB from shared memory")
    show("from_pretrained", size, took["plain"])
    show("the trainer's", size, took["load"], beside=took["plain"])
    print(f"  {'rehearsed pass of the memory check':42} {took['check']:7.2f} s")


# --------------------------------------------------------------------------------------------------------------- moves
def beside_a_plain_copy(model: Qwen3ForCausalLM) -> None:
    state = Residency(model, torch.device("cpu"), moves=True)
    size = 3 * 4 * len(state.gradients)
    source, copies = torch.ones(size // 4), list[Tensor]()

    def copy_to_new_memory() -> None:
        copies.append(source.clone())

    def copy_and_free() -> None:
        source.copy_(copies.pop())

    def offload() -> None:
        copies.clear()
        state.offload()

    def onload() -> None:
        copies[:] = [source.clone()]
        state.onload()

    took = in_turns({"copy": copy_to_new_memory, "onload": state.onload}, before=offload)
    took |= in_turns({"copy and free": copy_and_free, "offload": state.offload}, before=onload)
    print(f"moves of {size / GIB:.2f} GiB of parameters and moments")
    show("plain copy into new memory", size, took["copy"])
    show("onload", size, took["onload"], beside=took["copy"])
    show("plain copy, its source freed", size, took["copy and free"])
    show("offload", size, took["offload"], beside=took["copy and free"])


# --------------------------------------------------------------------------------------------------------------- steps
def beside_trl(name: str, lengths: Sequence[int], trained: str, dtype: str, folder: Path) -> None:
    if not CHECKOUT.environment(PEERS).exists():
        print("no trl: `make setup` installs it")
        return
    chance = torch.Generator().manual_seed(0)
    order = torch.randperm(len(lengths), generator=chance).tolist()
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=1536, num_hidden_layers=4,
            num_attention_heads=8, num_key_value_heads=4, head_dim=64, tie_word_embeddings=True, eos_token_id=1,
            pad_token_id=0, bos_token_id=None,
        )
    )  # fmt: skip
    write_tiny_model(folder / "model")  # for its tokenizer
    model.save_pretrained(folder / "model")

    def tokens(count: int) -> list[int]:
        drawn: list[int] = torch.randint(2, VOCABULARY, (count,), generator=chance).tolist()
        return drawn

    samples = [
        {"prompt": tokens(64), "response": tokens(lengths[place]), "reward": float(number % 3)}
        for number, place in enumerate(order)
    ]
    longest = 64 + max(lengths)
    case = {"samples": samples, "groupSize": GROUP_SIZE, "rows": ROWS, "longest": longest, "steps": STEPS}
    case |= {"dtype": dtype, "lora": {"rank": 16, "alpha": 32} if trained == "LoRA" else None}
    (folder / "case.json").write_text(json.dumps(case))
    count = sum(lengths)
    trl = [str(CHECKOUT.python(PEERS)), str(CHECKOUT.root / "tests/peers/trl_speed.py"), str(folder)]
    ours = [sys.executable, "-m", "bench.trainer", "--step", str(folder)]
    took: dict[str, list[float]] = {"trl": [], "ours": []}
    grew: dict[str, list[float]] = {"trl": [], "ours": []}
    for _ in range(TURNS - 1):
        for who, command in (("trl", trl), ("ours", ours)):
            answer = subprocess.run(
                command, env=(os.environ if who == "ours" else clean_environment()) | {"HF_HUB_OFFLINE": "1"},
                capture_output=True, text=True, timeout=STEP_S, check=True, cwd=CHECKOUT.root,
            )  # fmt: skip
            found = json.loads(answer.stdout.splitlines()[-1])
            took[who] += found["tookS"]
            grew[who].append(found["grewBytes"])
    print(f"optimization step on {len(samples)} completions of {count} tokens, {trained}, {dtype}, {name}")
    for who, times in took.items():
        speed, size = median(took["trl"]) / median(times), median(grew[who]) / median(grew["trl"])
        beside = f"  {speed:5.2f} x trl, {size:5.2f} of its memory" if who == "ours" else ""
        print(f"  {who:10} {count / median(times):8.0f} tokens/s {median(grew[who]) / 2**20:8.0f} MiB{beside}")


def train(folder: Path) -> dict[str, Any]:
    """Return the seconds of each step but the first, and by how much the process grew, model included."""
    case = json.loads((folder / "case.json").read_bytes())
    (folder / "job.json").write_text(json.dumps(job_file()))
    begin_bytes = resident_bytes()
    config = TrainerConfig(
        learning_rate=1e-4, micro_batch_tokens=case["rows"] * case["longest"], dtype=case["dtype"], lora=case["lora"]
    )
    settings = RankSettings(
        socket=folder / "unused", config=folder / "unused", job=folder / "job.json", model=folder / "model",
        checkpoints=folder, lineage=1, rank=0, world_size=1, local_rank=0, master_address="", master_port=0,
        device="cpu",
    )  # fmt: skip
    loop = GRPOTrainer(settings, config)
    loop.load()
    loop.onload()
    watch, took = Rank(rank=0, lineage=1, writes_weights=True), []
    for step in range(1, case["steps"] + 1):
        samples = [
            Example(
                sample["prompt"],
                sample["response"],
                [-math.log(VOCABULARY)] * len(sample["response"]),
                sample["reward"],
                number // case["groupSize"],
            )
            for number, sample in enumerate(case["samples"])
        ]
        (shard,) = write_shards(folder, samples, step=step, split=1)
        began = time.perf_counter()
        loop.train(step, shard, watch)
        took.append(time.perf_counter() - began)
    return {"tookS": took[1:], "grewBytes": peak_bytes() - begin_bytes}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
