"""The engine of the tests with a real model and a KV pool on the device, for a machine that has no SGLang.

What it maps, releases, loads, hashes and says of a prompt is real: its weights are an export in bfloat16, computed with
by transformers, and its pool fills the device as an engine's does. Only the tokens that it generates are made up.

It releases memory through torch_memory_saver, as SGLang does. Where that can't be used it frees the memory and
allocates it again, and says so in `released_by` of `/server_info`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM

from fakes.engine import BODY, CONTEXT_GB, TAGS, FakeEngine, checker_answer
from fakes.engine import main as serve

SAVER = "torch_memory_saver"
FREED = "memory freed and allocated again"
POOL_ON_CPU = 2**22  # bytes
HELD = 1.0  # the one number that the engine of the tests takes for its weights
MIXER = -7046029254386353131  # odd, from the golden ratio: neighbours get weights that have nothing in common
PIECE = 2**24  # elements hashed at a time
GIB = 2**30


class FreedMemory:
    """Does what the memory saver does, by other means: the memory goes back to the driver, the tensors stay."""

    name = FREED

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sizes: dict[str, list[tuple[Tensor, int]]] = {}

    def map(self, tag: str, make: Callable[[], list[Tensor]]) -> None:
        self._sizes[tag] = [(tensor, tensor.untyped_storage().nbytes()) for tensor in make()]

    def pause(self, tag: str) -> None:
        for tensor, _ in self._sizes[tag]:
            tensor.untyped_storage().resize_(0)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()

    def resume(self, tag: str) -> None:
        for tensor, size in self._sizes[tag]:
            tensor.untyped_storage().resize_(size)


class SavedMemory:
    """Maps and unmaps through torch_memory_saver, below tensors that stay where they are. Raises where it can't."""

    name = SAVER

    def __init__(self) -> None:
        from torch_memory_saver import torch_memory_saver

        self._saver = torch_memory_saver
        self._saver.hook_mode = "torch"  # without LD_PRELOAD
        with self._saver.region(tag="trial"):  # it loads its library at the first use
            torch.zeros(1, device="cuda")

    def map(self, tag: str, make: Callable[[], list[Tensor]]) -> None:
        with self._saver.region(tag=tag):
            make()

    def pause(self, tag: str) -> None:
        torch.cuda.synchronize()
        self._saver.pause(tag)

    def resume(self, tag: str) -> None:
        self._saver.resume(tag)


def choose_memory(
    device: torch.device, saved: Callable[[], SavedMemory] = SavedMemory
) -> tuple[FreedMemory | SavedMemory, str]:
    """Return how memory is released on this device, and why not through the memory saver; "": it is."""
    if device.type != "cuda":
        return FreedMemory(device), "a CPU has no memory of its own"
    try:
        return saved(), ""
    except (ImportError, OSError, RuntimeError, AssertionError) as error:  # each of them is how it does not load
        return FreedMemory(device), f"{type(error).__name__}: {error}"


class DeviceEngine(FakeEngine):
    """An engine whose weights and KV pool are on a device. share: of the device, for both."""

    def __init__(self, model: Path, version: str, *, device: torch.device, share: float, **others: Any) -> None:
        self._device = device
        self._memory, why = choose_memory(device)
        print(f"memory is released by: {self._memory.name} {why}", flush=True)  # the runner writes it into the log
        self._net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval().requires_grad_(False)
        self.vocabulary = int(self._net.config.vocab_size)
        self._parameters = dict(self._net.named_parameters())
        self._bytes = {"weights": sum(tensor.nbytes for tensor in self._parameters.values())}
        self._memory.map("weights", self._weights_to_device)
        self._net.to(device)  # its buffers, which an engine keeps
        self._bytes["kv_cache"] = self._pool_bytes(share)
        self._memory.map("kv_cache", self._make_pool)
        super().__init__(model, version, **others)
        usage = {
            "weight": self._bytes["weights"] / GIB,
            "kvcache": self._bytes["kv_cache"] / GIB,
            "token_capacity": self.pool_tokens,
        }
        self.info = {
            "dtype": "bfloat16",
            "released_by": self._memory.name,
            "internal_states": [{"memory_usage": usage}],
        }

    def _weights_to_device(self) -> list[Tensor]:
        for parameter in self._parameters.values():
            parameter.data = parameter.data.to(self._device, copy=True)
        return list(self._parameters.values())

    def _pool_bytes(self, share: float) -> int:
        if self._device.type != "cuda":
            return POOL_ON_CPU
        free, total = torch.cuda.mem_get_info(self._device)
        return int(max(0, min(share * total - self._bytes["weights"], 0.95 * free)))

    def _make_pool(self) -> list[Tensor]:
        self._pool = torch.zeros(self._bytes["kv_cache"], dtype=torch.uint8, device=self._device)
        return [self._pool]

    def load(self, directory: Path) -> float | None:
        missing = dict(self._parameters)
        for file in sorted(directory.glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                    if (parameter := missing.pop(name, None)) is not None:
                        parameter.copy_(tensors.get_tensor(name))
        return None if missing else HELD

    def prompt_logprobs(self, prompt: list[int]) -> list[float]:
        with torch.inference_mode():
            ids = torch.tensor([prompt], device=self._device)
            logp = torch.log_softmax(self._net(input_ids=ids, use_cache=False).logits[0, :-1].float(), dim=-1)
            return logp.gather(1, ids[0, 1:, None])[:, 0].tolist()

    def show_memory(self, *, leaked: bool = False) -> None:
        """On a CPU, write down what it holds for the stand-in of a device; a real one is asked."""
        if (directory := os.environ.get("FAKE_DEVICE")) is not None:
            held = sum(size for tag, size in self._bytes.items() if leaked or tag not in self.released)
            (Path(directory) / str(os.getpid())).write_text(str(int(CONTEXT_GB * GIB) + held))

    async def serve_release(self, request: web.Request) -> web.Response:
        answer = await super().serve_release(request)
        for tag in self._tags(request):
            self._memory.pause(tag)
        return answer

    async def serve_resume(self, request: web.Request) -> web.Response:
        answer = await super().serve_resume(request)
        for tag in self._tags(request):
            self._memory.resume(tag)
        return answer

    def _tags(self, request: web.Request) -> list[str]:
        return [tag for tag in request[BODY].get("tags") or TAGS if tag in self._bytes]

    async def serve_checker(self, request: web.Request) -> web.Response:
        await super().serve_checker(request)  # of what it dies
        found = {name: checksum_of(parameter) for name, parameter in self._parameters.items()}
        return checker_answer(found, of_all=hashlib.sha256("".join(found.values()).encode()).hexdigest())


def checksum_of(tensor: Tensor) -> str:
    """Return a number that depends on each 16-bit element and its place, the same on every device."""
    bits, found = tensor.detach().contiguous().view(torch.int16).flatten(), 0
    for start in range(0, len(bits), PIECE):
        piece = bits[start : start + PIECE].to(torch.int64)
        weight = torch.arange(start + 1, start + 1 + len(piece), device=bits.device).mul_(MIXER)
        weight.bitwise_xor_(weight >> 29).mul_(MIXER)
        found += int((piece * weight).sum())
    return f"{found % 2**64:016x}"


def main(arguments: Sequence[str] = sys.argv[1:]) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--device", type=torch.device, required=True)
    parser.add_argument("--mem-fraction-static", type=float, required=True)
    given, _ = parser.parse_known_args(arguments)
    serve(partial(DeviceEngine, device=given.device, share=given.mem_fraction_static))


if __name__ == "__main__":
    main()
