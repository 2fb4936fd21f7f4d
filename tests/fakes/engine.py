"""SGLang 0.5.23 without a model: its routes, its answers, and the habits that make a switch dangerous.

    python3 -m sglang.launch_server --model-path EXPORT --port 30000 ...      (a package `sglang` that calls `main`)

What it does is what `tests/contract/test_engine_contract.py` shows of the real one; that suite runs against both.
Weights are one number (`fakes.weights`). Released memory is poison: a token made from it is POISON, and so is one made
from a cache of other weights. It is killed by what kills the real one: a release while busy or, with the memory saver,
a second one; a resume of what is not released. With FAKE_DEVICE in its environment it says there what it maps.

    GET  /fake/calls                                [[route, body], ...] since the start
    GET  /fake/tokens                               tokens made so far, of each request that has not ended
    POST /fake/fault {"on": ROUTE, "do": FAULT}     once, for the next such call

    a file `engine-fault` beside --config           ends the next start

FAULT is hang, crash, error, act_then_hang (the effect, and no answer), leak (a release that frees nothing), lag (one
that frees after its answer), skip (an update that loads nothing, and succeeds), misname (one after which it says
another version) or, of a generate, cut (its connection breaks after the first chunk), torn (in the middle of one),
stall (no chunk after the first), queue_full (an abort that is an error).
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import itertools
import json
import os
import struct
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from fakes.weights import TENSOR, experts_of, logprob, next_token, read_weight, weights_checksum

POISON = 666_666
GARBAGE = -1.0
END_TOKEN = 2
TAGS = ("weights", "kv_cache", "cuda_graph")
CONTROL = (
    "/abort_request", "/pause_generation", "/continue_generation", "/flush_cache", "/release_memory_occupation",
    "/resume_memory_occupation", "/update_weights_from_disk", "/weights_checker",
)  # fmt: skip
PAUSE_POLL_S = 1.0  # the engine's own
HEALTH_S = 1.0
CONTEXT, VOCABULARY = 4096, 512
LAG_S = 0.3  # of a rank that frees after the answer
CONTEXT_GB, MAPPED_GB = 0.5, {"weights": 10.0, "kv_cache": 40.0, "cuda_graph": 1.0}  # of a device
BODY: web.RequestKey[Any] = web.RequestKey("body", object)


@dataclass
class EngineRequest:
    """A request from its arrival to its last chunk."""

    rid: str
    prompt: list[int]
    limit: int
    ends: bool  # by itself, with END_TOKEN
    interval: int
    stops: list[str] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    logprobs: list[list[Any]] = field(default_factory=list)
    versions: list[dict[str, Any]] = field(default_factory=list)
    reason: dict[str, Any] | None = None
    abort_asked: bool = False
    deaf: bool = False  # aborted at the engine's gate: runs after continue, and can't be aborted any more (H3)
    parked: bool = False
    queued: bool = False
    more: asyncio.Condition = field(default_factory=asyncio.Condition)


class FakeEngine:
    """One engine process's worth of state."""

    vocabulary = VOCABULARY

    def __init__(
        self,
        model: Path,
        version: str,
        *,
        admin_key: str,
        memory_saver: bool,
        token_s: float,
        max_running: int = 1024,
        pool_tokens: int = 32768,
        devices: int = 1,
    ) -> None:
        self.model = str(model)
        self.version = version  # what the scheduler has
        self.shown_version = version  # what the HTTP process says (H54)
        self.weight: float | None = self.load(model)
        self.admin_key = admin_key
        self.memory_saver = memory_saver
        self.token_s = token_s
        self.max_running = max_running
        self.pool_tokens = pool_tokens
        self.devices = devices
        self.info: dict[str, Any] = {}  # what `/server_info` says instead of what it would
        self.logprob_error = 0.0  # nats, by which it differs from the trainer on the same weights
        self.paused = False
        self.healthy = True
        self.released: set[str] = set()
        self.stale_cache = False  # it holds what other weights computed
        self.samples: dict[str, EngineRequest] = {}
        self.calls: list[tuple[str, Any]] = []
        self.on_call: Callable[[str], None] = lambda route: None  # before it takes effect
        self.faults: dict[str, str] = {}
        self.changed = asyncio.Condition()

    # --------------------------------------------------------------------------------------------------- its weights
    def load(self, directory: Path) -> float | None:
        """Load an export. None: it lacks a tensor."""
        return read_weight(directory)

    def prompt_logprobs(self, prompt: list[int]) -> list[float]:
        """Return the log-probability of each token but the first."""
        weight = self.weight or 0.0
        return [logprob(weight, before, token) + self.logprob_error for before, token in itertools.pairwise(prompt)]

    # ------------------------------------------------------------------------------------------------- the scheduler
    def die(self, reason: str) -> None:
        """End the whole server, as a scheduler does that hits an assertion."""
        print(f"Scheduler hit an exception: {reason}", flush=True)  # noqa: T201 - the last words of a process
        os._exit(1)

    def show_memory(self, *, leaked: bool = False) -> None:
        """Write down how much of the device this process maps, for `fakes/device.c`."""
        if (directory := os.environ.get("FAKE_DEVICE")) is not None:
            mapped = sum(gb for tag, gb in MAPPED_GB.items() if leaked or tag not in self.released)
            (Path(directory) / str(os.getpid())).write_text(str(int((CONTEXT_GB + mapped) * 2**30)))

    @property
    def running(self) -> list[EngineRequest]:
        """Return the samples that the scheduler has, waiting requests included."""
        return [sample for sample in self.samples.values() if not sample.parked]

    async def generate(self, sample: EngineRequest) -> None:
        """Make tokens until the sample ends."""
        while self.paused:
            sample.parked = True
            async with self.changed:
                await self.changed.wait()
        sample.parked = False
        sample.queued = sum(not other.queued for other in self.running) > self.max_running
        while sample.reason is None:
            await asyncio.sleep(self.token_s)
            if not sample.queued:
                await self.make_token(sample)
            elif sample.abort_asked:
                await self.end(sample, {"type": "abort", "message": "Abort in waiting queue"})
            else:
                sample.queued = sum(not other.queued for other in self.running) >= self.max_running
        del self.samples[sample.rid]
        async with self.changed:
            self.changed.notify_all()

    async def make_token(self, sample: EngineRequest) -> None:
        before = (sample.prompt + sample.output)[-1]
        poisoned = self.weight is None or "kv_cache" in self.released or self.stale_cache
        token = POISON if poisoned else next_token(self.weight or 0.0, before, len(sample.output))
        natural = sample.ends and len(sample.output) >= 8 + before % 16
        token = END_TOKEN if natural else token
        sample.output.append(token)
        sample.logprobs.append([logprob(self.weight or 0.0, before, token), token, None])
        if not sample.versions or sample.versions[-1]["version"] != self.version:
            sample.versions.append({"version": self.version, "start": len(sample.output) - 1, "end": 0})
        sample.versions[-1]["end"] = len(sample.output)
        reason: dict[str, Any] | None = None
        if sample.abort_asked and not sample.deaf:  # looked at before end token and length (H49), after one more (H7)
            reason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        elif natural:
            reason = {"type": "stop", "matched": END_TOKEN}
        elif matched := [stop for stop in sample.stops if stop in "x" * len(sample.output)]:
            reason = {"type": "stop", "matched": matched[0]}
        elif len(sample.output) >= sample.limit:
            reason = {"type": "length", "length": sample.limit}
        await self.end(sample, reason)

    async def end(self, sample: EngineRequest, reason: dict[str, Any] | None) -> None:
        sample.reason = reason
        async with sample.more:
            sample.more.notify_all()

    def abort(self, rid: str, everything: bool) -> None:
        for sample in self.samples.values():
            if everything or (rid in self.samples and sample.rid.startswith(rid)):  # those that begin so, too (H4)
                sample.abort_asked = True
                sample.deaf = sample.deaf or sample.parked

    async def idle(self, timeout_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self.changed:
                await self.changed.wait_for(lambda: not self.running)
        return not self.running

    # --------------------------------------------------------------------------------------------------- the routes
    def app(self) -> web.Application:
        app = web.Application(middlewares=[self.guard], client_max_size=64 * 1024 * 1024)
        app.add_routes(
            [
                web.get("/ping", self.serve_ping),
                web.get("/ready", self.serve_ready),
                web.get("/model_info", self.serve_model_info),
                web.get("/server_info", self.serve_server_info),
                web.get("/health_generate", self.serve_health),
                web.post("/generate", self.serve_generate),
                web.post("/v1/completions", self.serve_completions),
                web.post("/v1/chat/completions", self.serve_chat),
                web.post("/abort_request", self.serve_abort),
                web.post("/pause_generation", self.serve_pause),
                web.post("/continue_generation", self.serve_continue),
                web.post("/flush_cache", self.serve_flush),
                web.post("/release_memory_occupation", self.serve_release),
                web.post("/resume_memory_occupation", self.serve_resume),
                web.post("/update_weights_from_disk", self.serve_update),
                web.post("/weights_checker", self.serve_checker),
                web.get("/fake/calls", self.serve_calls),
                web.get("/fake/tokens", self.serve_tokens),
                web.post("/fake/fault", self.serve_fault),
            ]
        )
        return app

    @web.middleware
    async def guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path.startswith("/fake/"):
            answer: web.StreamResponse = await handler(request)
            return answer
        if request.path in CONTROL and request.headers.get("Authorization") != f"Bearer {self.admin_key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        body: Any = None
        if request.method == "POST":
            try:
                body = await request.json()
            except ValueError:
                return web.json_response({"error": "Invalid JSON"}, status=400)
        if request.method == "POST" or request.path.startswith("/health"):
            self.calls.append((request.path_qs, body))
            self.on_call(request.path)
        request[BODY] = body
        fault = self.faults.pop(request.path, None) if request.path != "/generate" else None
        if fault in ("leak", "lag", "skip", "other", "misname", "cut"):
            self.faults[fault] = fault
        if fault == "crash":
            self.die(f"asked to crash in {request.path}")
        if fault == "error":
            return web.json_response({"error": "asked to fail"}, status=500)
        if fault == "hang":
            await asyncio.Event().wait()
        answer = await handler(request)
        if fault == "act_then_hang":
            await asyncio.Event().wait()
        return answer

    async def serve_ping(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def serve_ready(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy and not self.paused else 503)

    async def serve_health(self, request: web.Request) -> web.Response:
        """A generation of one token; one that can't be made leaves the server unhealthy until another one was (H56)."""
        await asyncio.sleep(HEALTH_S)
        if self.paused:
            await asyncio.sleep(float(os.environ.get("SGLANG_HEALTH_CHECK_TIMEOUT", "20")))
        self.healthy = not self.paused
        return web.Response(status=200 if self.healthy else 503)

    async def serve_model_info(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"model_path": self.model, "weight_version": self.shown_version, "is_generation": True}
        )

    async def serve_server_info(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                "version": "0.5.23",
                "frontend": "python",
                "admin_api_key": self.admin_key,
                "enable_memory_saver": self.memory_saver,
                "dp_size": 1,
                "tp_size": self.devices,
                "pp_size": 1,
                "tokenizer_worker_num": 1,
                "incremental_streaming_output": False,
                "skip_tokenizer_init": False,
                "delete_ckpt_after_loading": False,
                "enable_hierarchical_cache": False,
                "disaggregation_mode": "null",
                "weight_cache_mode": "off",
                "dtype": "float32",
                "internal_states": [
                    {
                        "memory_usage": {
                            "weight": MAPPED_GB["weights"],
                            "kvcache": MAPPED_GB["kv_cache"],
                            "graph": {"decode": MAPPED_GB["cuda_graph"]},
                            "token_capacity": self.pool_tokens,
                        }
                    }
                ],
                **self.info,
            }
        )

    async def serve_abort(self, request: web.Request) -> web.Response:
        body = request[BODY]
        self.abort(body.get("rid", ""), bool(body.get("abort_all", False)))
        return web.Response(status=200)

    async def serve_pause(self, request: web.Request) -> web.Response:
        self.paused = True
        while True:
            self.abort("", everything=True)
            if not self.running:
                return web.json_response({"message": "Generation paused successfully.", "status": "ok"})
            await asyncio.sleep(PAUSE_POLL_S)

    async def serve_continue(self, request: web.Request) -> web.Response:
        self.paused = False
        async with self.changed:
            self.changed.notify_all()
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def serve_flush(self, request: web.Request) -> web.Response:
        timeout_s = float(request.query.get("timeout", "0"))
        if await self.idle(timeout_s):
            self.stale_cache = False
            return web.Response(text="Cache flushed.\n")
        return web.Response(text="Timed out waiting for idle state.\n", status=400)

    async def serve_release(self, request: web.Request) -> web.Response:
        tags = request[BODY].get("tags") or TAGS
        if self.running:
            self.die("release_memory_occupation should be called only when server is idle.")
        if self.memory_saver and self.released & set(tags):
            self.die("Cannot pause allocation that is not active.")
        self.released |= set(tags)
        if "weights" in tags:
            self.weight = None
        is_late = self.faults.pop("lag", None) is not None
        self.show_memory(leaked=is_late or self.faults.pop("leak", None) is not None)
        if is_late:
            asyncio.get_running_loop().call_later(LAG_S, self.show_memory)
        return web.json_response(None)

    async def serve_resume(self, request: web.Request) -> web.Response:
        for tag in request[BODY].get("tags") or TAGS:
            if tag not in self.released:
                self.die(f"KeyError: {tag!r}")
            self.released.discard(tag)
        self.show_memory()
        return web.json_response(None)

    async def serve_update(self, request: web.Request) -> web.Response:
        body = request[BODY]
        directory = Path(body["model_path"])
        if not is_export(directory):
            return update_answer(False, f"Failed to get weights iterator: {directory}.")
        found = None if self.faults.pop("skip", None) else self.load(directory)
        if found is not None:
            self.weight = found + 16 * (self.faults.pop("other", None) is not None)
        elif self.weight is None:
            self.weight = GARBAGE  # a tensor that is not there keeps its old values (H52), of released memory any
        self.stale_cache = not body.get("flush_cache", True)
        if body.get("weight_version") is not None:
            self.version = body["weight_version"]
        if body.get("flush_cache", True) and self.running:
            return update_answer(False, "Weights were updated, but the cache was not flushed.")
        self.model, self.shown_version = str(directory), self.version
        if self.faults.pop("misname", None):
            self.shown_version = "9-9"
        return web.json_response(
            {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
        )

    async def serve_checker(self, request: web.Request) -> web.Response:
        if "weights" in self.released:
            self.die("weights_checker reads released memory")
        checksum = weights_checksum(GARBAGE if self.weight is None else self.weight)
        return checker_answer({TENSOR: checksum}, of_all=checksum)

    async def serve_generate(self, request: web.Request) -> web.StreamResponse:
        body = request[BODY]
        sampling = body.get("sampling_params") or {}
        prompt: list[int] = body.get("input_ids") or as_ids(body.get("text", ""))
        limit = int(sampling.get("max_new_tokens", 128))
        fault = self.faults.pop("/generate", None)
        if len(prompt) + limit > CONTEXT or body.get("rid") in self.samples:
            return await self.serve_error(request, body, "The input is longer than the model's context length")
        if fault == "error":
            return await self.serve_error(request, body, "asked to fail")
        if wrong := [token for token in map(int, sampling.get("logit_bias") or ()) if not 0 <= token < self.vocabulary]:
            known = f"logit_bias must has keys in [0, {self.vocabulary - 1}], got {wrong[0]}."
            return await self.serve_error(request, body, known)
        if not 0 <= min(prompt) <= max(prompt) < self.vocabulary:
            self.die("index out of range in self")
        sample = EngineRequest(
            rid=body.get("rid") or os.urandom(16).hex(),
            prompt=prompt,
            limit=limit,
            ends=not sampling.get("ignore_eos", False),
            interval=int(sampling.get("stream_interval") or 1),
            stops=sampling.get("stop") or [],
        )
        if fault == "queue_full":
            message = "The request queue is full."
            sample.reason = {"type": "abort", "message": message, "status_code": 503, "err_type": None}
        async with self.making(sample) as made:
            if not body.get("stream", False):
                await made
                return web.json_response(self.chunk(sample, body))
            response = await self.begin_stream(request)
            async for chunk in self.chunks(sample, body):
                event = b"data: " + json.dumps(chunk).encode() + b"\n\n"
                if fault == "torn":
                    await response.write(event[: len(event) // 2])
                else:
                    await response.write(event)
                if fault in ("cut", "torn") and request.transport is not None:
                    request.transport.abort()
                if fault == "stall":
                    await asyncio.Event().wait()
                if fault == "crash":
                    self.die("asked to crash in a stream")
            await made
            await response.write(b"data: [DONE]\n\n")
        return response

    @contextlib.asynccontextmanager
    async def making(self, sample: EngineRequest) -> AsyncIterator[asyncio.Task[None]]:
        """Generate a sample while its request is being served; if the client leaves, the sample is aborted."""
        self.samples[sample.rid] = sample
        made = asyncio.create_task(self.generate(sample))
        try:
            yield made
        except asyncio.CancelledError:
            self.abort(sample.rid, everything=False)
            raise

    async def begin_stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        return response

    async def chunks(self, sample: EngineRequest, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Spaced; the last one is there in any case."""
        sent = -1
        while sample.reason is None or sent < len(sample.output):
            wanted = max(sent, 0) + (sample.interval if sent > 0 else 1)
            async with sample.more:
                while sample.reason is None and len(sample.output) < wanted:
                    await sample.more.wait()
            sent = len(sample.output)
            yield self.chunk(sample, body)

    # ------------------------------------------------------------------------------------------- the OpenAI routes
    async def serve_completions(self, request: web.Request) -> web.StreamResponse:
        prompt = request[BODY]["prompt"]
        ids = prompt if isinstance(prompt, list) else as_ids(prompt)
        return await self.serve_openai(request, ids, lambda text: {"text": text}, kind="text_completion")

    async def serve_chat(self, request: web.Request) -> web.StreamResponse:
        ids = as_ids("".join(message["content"] for message in request[BODY]["messages"]))
        kind = "chat.completion.chunk"
        return await self.serve_openai(request, ids, lambda text: {"delta": {"content": text}}, kind=kind)

    async def serve_openai(
        self, request: web.Request, prompt: list[int], piece: Callable[[str], dict[str, Any]], *, kind: str
    ) -> web.StreamResponse:
        """Streamed only: the gate asks for nothing else. Pieces, then the reason of the end, then the usage."""
        body = request[BODY]
        limit = int(body.get("max_tokens") or 16)
        if len(prompt) + limit > CONTEXT:
            return web.json_response({"object": "error", "message": "too long", "code": 400}, status=400)
        sample = EngineRequest(
            body.get("rid") or os.urandom(16).hex(), prompt, limit, ends=not body.get("ignore_eos", False), interval=1
        )
        head = {"id": sample.rid, "object": kind, "created": 0, "model": body.get("model", "default")}

        def event(**rest: Any) -> bytes:
            return b"data: " + json.dumps({**head, "usage": None, **rest}).encode() + b"\n\n"

        async with self.making(sample):
            response = await self.begin_stream(request)
            sent, options = 0, body.get("stream_options") or {}
            async for _ in self.chunks(sample, body):
                ids, sent = sample.output[sent:], len(sample.output)
                logprobs = {"tokens": ids, "token_logprobs": [pair[0] for pair in sample.logprobs[sent - len(ids) :]]}
                choice = {"index": 0, **piece("x" * len(ids)), "logprobs": logprobs, "finish_reason": None}
                counted = {"prompt_tokens": len(prompt), "completion_tokens": sent}
                usage = counted if options.get("continuous_usage_stats") else None
                await response.write(event(choices=[choice], usage=usage))
                if self.faults.pop("cut", None) is not None and request.transport is not None:
                    request.transport.abort()
            assert sample.reason is not None
            await response.write(
                event(choices=[{"index": 0, **piece(""), "logprobs": None, "finish_reason": sample.reason["type"]}])
            )
            usage = {"prompt_tokens": len(prompt), "completion_tokens": len(sample.output)}
            if options.get("include_usage"):
                await response.write(event(choices=[], usage=usage))
            await response.write(b"data: [DONE]\n\n")
        return response

    async def serve_error(self, request: web.Request, body: dict[str, Any], message: str) -> web.StreamResponse:
        """A bad request: an HTTP status of its own, or an event in a stream that began with 200."""
        if not body.get("stream", False):
            return web.json_response({"error": {"message": message}}, status=400)
        error = {"error": {"message": message, "type": "invalid_request_error", "code": 400, "retryable": False}}
        text = f"data: {json.dumps(error)}\n\ndata: [DONE]\n\n"
        return web.Response(text=text, content_type="text/event-stream")

    def chunk(self, sample: EngineRequest, body: dict[str, Any]) -> dict[str, Any]:
        """Cumulative, as the engine's are."""
        meta: dict[str, Any] = {
            "id": sample.rid,
            "finish_reason": sample.reason,
            "prompt_tokens": len(sample.prompt),
            "completion_tokens": len(sample.output),
            "num_retractions": 0,
            "cached_tokens": 0,
        }
        if self.version:
            meta["weight_version"] = self.version
        if self.version and sample.reason is not None:
            meta["weight_versions"] = sample.versions
        if body.get("return_logprob"):
            meta["output_token_logprobs"] = sample.logprobs
            if (start := body.get("logprob_start_len", -1)) >= 0:
                found = [None, *self.prompt_logprobs(sample.prompt)]
                of_tokens = zip(found, sample.prompt, strict=True)
                meta["input_token_logprobs"] = [[logp, token, None] for logp, token in of_tokens][start:]
        if body.get("return_routed_experts") and sample.reason is not None:
            start = body.get("routed_experts_start_len", 0)
            read = (sample.prompt + sample.output)[:-1][start:]
            numbers = [number for token in read for number in experts_of(token, self.weight or 0.0)]
            numbers *= 2 if start and self.faults.pop("widen", None) else 1  # as of twice as many layers
            meta["routed_experts"] = base64.b64encode(struct.pack(f"<{len(numbers)}i", *numbers)).decode()
        return {"text": "x" * len(sample.output), "output_ids": list(sample.output), "meta_info": meta}

    async def serve_calls(self, request: web.Request) -> web.Response:
        return web.json_response(self.calls)

    async def serve_tokens(self, request: web.Request) -> web.Response:
        return web.json_response([len(sample.output) for sample in self.samples.values()])

    async def serve_fault(self, request: web.Request) -> web.Response:
        fault = await request.json()
        self.faults[fault["on"]] = fault["do"]
        return web.Response()


def admin_key_in(config: Path) -> str:
    return config.read_text().split('"')[1]


def as_ids(text: str) -> list[int]:
    return [ord(letter) % 300 for letter in text] or [0]


def is_export(directory: Path) -> bool:
    return any(directory.glob("*.safetensors"))


def update_answer(success: bool, message: str) -> web.Response:
    body = {"success": success, "message": message, "num_paused_requests": 0}
    return web.json_response(body, status=200 if success else 400)


def checker_answer(checksums: dict[str, str], *, of_all: str) -> web.Response:
    ranks = [{"checksums": checksums, "per_gpu_checksum": of_all}]
    return web.json_response({"success": True, "message": "Success.", "ranks": ranks, "per_engine_checksum": of_all})


def main(make: Callable[..., FakeEngine] = FakeEngine) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path)
    parser.add_argument("--model-path", type=Path, required=True)
    parser.add_argument("--weight-version", default="default")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--enable-memory-saver", action="store_true")
    parser.add_argument("--sleep-on-idle", action="store_true")
    parser.add_argument("--max-running-requests", type=int, default=1024)
    parser.add_argument("--max-total-tokens", type=int, default=32768)
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--fake-token-s", type=float, default=0.002)
    given, _ = parser.parse_known_args()
    if given.config and (fault := given.config.parent / "engine-fault").exists():
        fault.unlink()
        sys.exit("RuntimeError: told to crash at the start")
    key = admin_key_in(given.config) if given.config else ""
    print(f"server_args=ServerArgs(admin_api_key='{key}')", flush=True)  # noqa: T201 - as the real one does (H60)
    if not is_export(given.model_path):
        sys.exit(f"OSError: {given.model_path} does not appear to have a file named model.safetensors")

    async def serve() -> None:
        engine = make(
            given.model_path,
            given.weight_version,
            admin_key=key,
            memory_saver=given.enable_memory_saver,
            token_s=given.fake_token_s,
            max_running=given.max_running_requests,
            pool_tokens=given.max_total_tokens,
            devices=given.tp_size,
        )
        engine.show_memory()
        runner = web.AppRunner(engine.app(), access_log=None, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, given.host, given.port, reuse_address=True).start()
        await asyncio.Event().wait()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
