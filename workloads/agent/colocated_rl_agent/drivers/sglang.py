"""This driver starts and calls SGLang 0.5.23, and checks its settings before a switch relies on it.

It assumes one caller, this agent: the engine listens on loopback with an admin key of its own incarnation. Every call
has a deadline; past it the outcome is unknown and the caller replaces the engine. Nothing is ever sent twice here.
The engine ignores unknown fields and tags with 200 (H42), so only this file builds bodies.
`/server_info` shows the admin key: it is parsed for a few fields and never kept or logged (H60).
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import aiohttp
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from colocated_rl_agent.drivers.base import CallRefused, OutcomeUnknown, Unsuitable, read_answer, read_body, within
from colocated_rl_agent.planner.views import CUDA_GRAPH, KV_CACHE, WEIGHTS
from colocated_rl_api.engines import SGLANG, abbreviates
from colocated_rl_api.rungs import WeightVersion

FLUSH_MARGIN = 0.8  # the engine's flush timeout as a share of our deadline: its answer must come first
MAX_ANSWER_BYTES = 64 * 1024 * 1024  # with a checksum it names each tensor of each rank
MAX_ERROR_BYTES = 1000
SEE_LOG = "see the engine's log"
ENGINE_KEEP_ALIVE_S = 75
IDLE_CONNECTION_S = 15.0  # well below the engine's: a request on a connection that the engine just closed is lost

LOOPBACK = "127.0.0.1"
PREFILL_GRAPHS = "--cuda-graph-backend-prefill"  # by default breakable, which can't be released: refused at the start
POOL = "--max-total-tokens"
PARALLELISM = ("--tp-size", "--tensor-parallel-size", "--pp-size", "--pipeline-parallel-size")
GIB = 2**30

Method = Literal["GET", "POST"]


@dataclass(frozen=True)
class EngineCommand:
    """An EngineCommand starts an engine on an export. `admin_key` goes into a file: anybody can read arguments."""

    argv: tuple[str, ...]
    env: dict[str, str | None]


@dataclass(frozen=True)
class PartPlace:
    """A PartPlace is that of one part of an engine over several pods.

    rank: of the pod among them. address, port: of the first one, where all parts meet. interface: the network
    interface towards it: left to themselves, gloo and NCCL pick one by what the host's name resolves to.
    """

    rank: int
    pods: int
    address: str
    port: int
    interface: str

    @property
    def flags(self) -> tuple[str, ...]:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return (
            "--nnodes", str(self.pods), "--node-rank", str(self.rank), "--dist-init-addr", f"{host}:{self.port}",
        )  # fmt: skip


def engine_command(
    *,
    model: Path,
    version: WeightVersion,
    port: int,
    config: Path,
    gpus: int,
    saved_tags: Collection[str],
    extra: Sequence[str],
    pool_tokens: int | None = None,
    place: PartPlace | None = None,
) -> EngineCommand:
    """Return the command of an engine, or of its part in this pod. gpus: of the pod, that are the engine's.

    `config`: written by `engine_config`. `extra`: spec.rollout.engine.args, which may not set any flag set here.
    `saved_tags`: device memory that the engine will release and resume; other memory avoids the cost of that.
    `pool_tokens`: KV pool of the pod's first engine, for its replacements: budgets were checked with that one, and a
    replacement starts beside the trainer's remaining memory on the device.
    """
    argv = [
        "python3", "-m", "sglang.launch_server",
        "--config", str(config),
        "--model-path", str(model),
        "--weight-version", str(version),
        "--host", LOOPBACK,
        "--port", str(port),
        "--sleep-on-idle",  # an idle engine must not take the trainer's cores
    ]  # fmt: skip
    if saved_tags:
        argv.append("--enable-memory-saver")
    saves_graphs = CUDA_GRAPH in saved_tags
    defaults = {PREFILL_GRAPHS: "disabled"} if saves_graphs else {}
    if pool_tokens is not None:
        defaults[POOL] = str(pool_tokens)
    for flag, value in defaults.items():
        if not _sets(extra, flag):
            argv += [flag, value]
    ranks = max(1, gpus) * (place.pods if place else 1)
    if ranks > 1 and not any(_sets(extra, flag) for flag in PARALLELISM):
        argv += [PARALLELISM[0], str(ranks)]  # the engine's default leaves all devices but one idle
    argv += place.flags if place else ()
    env: dict[str, str | None] = {
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",  # a crash takes 70 s otherwise (H56)
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
        "SGLANG_RUST_SERVER": None,  # another HTTP server, with other rules
        "SGLANG_REQ_WAITING_TIMEOUT": None,  # aborts that look like a switch
        "SGLANG_REQ_RUNNING_TIMEOUT": None,
        "SGLANG_RETURN_ORIGINAL_LOGPROB": None,  # behaviour log-probabilities are those of the sampling temperature
        "PYTORCH_CUDA_ALLOC_CONF": None,  # expandable segments can't be released
        "PYTORCH_ALLOC_CONF": None,
        "GLOO_SOCKET_IFNAME": place.interface if place else "lo",  # its processes authenticate nobody (H65)
        "SGLANG_TIMEOUT_KEEP_ALIVE": str(ENGINE_KEEP_ALIVE_S),
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",  # a curious /health must not generate (H16)
    }
    if saves_graphs:
        env["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = "1"  # releasing cuda_graph frees nothing without it
    if place:
        env["NCCL_SOCKET_IFNAME"] = place.interface
    if gpus == 0:
        env["SGLANG_USE_CPU_ENGINE"] = "1"
        if place:  # its ranks would take a NUMA node each, and what there is of NCCL for the devices that it needs
            env |= {"SGLANG_CPU_OMP_THREADS_BIND": "|".join("0" * ranks), "SGLANG_NCCL_SO_PATH": "/dev/null"}
    return EngineCommand((*argv, *extra), env)


def undivided_heads(model: Path, *, gpus: int, of: int, extra: Sequence[str]) -> str | None:
    """Return why an engine can't divide the model's attention among its devices, with the numbers that can, or None.

    gpus: the engine's devices, in all of its pods. of: the pod's. The engine requires it too (SGLang 0.5.23,
    `models/llama.py`), by an assertion that names no number. A configuration that says nothing of heads is the
    engine's to judge.
    """
    if gpus < 2 or any(_sets(extra, flag) for flag in PARALLELISM):
        return None
    try:
        config = json.loads((model / "config.json").read_text())
        config = config.get("text_config") or config
        heads = int(config["num_attention_heads"])
        shared = int(config.get("num_key_value_heads") or heads)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None

    def divides(ranks: int) -> bool:
        return heads % ranks == 0 and (shared % ranks == 0 or ranks % shared == 0)

    if divides(gpus):
        return None
    why = f"the model's {heads} attention heads ({shared} of keys and values) can't be divided among {gpus} devices"
    if gpus > of:
        numbers = [str(ranks) for ranks in range(2, gpus + 1) if divides(ranks)]
        return f"{why}: let rollout.engine.pods times the {of} devices of a pod be {' or '.join(numbers)}"
    fitting = [str(of // ranks) for ranks in range(gpus, 0, -1) if of % ranks == 0 and divides(ranks)]
    return f"{why}: set rollout.engine.perPod to {' or '.join(fitting)}, of {of} devices in the pod"


def _sets(words: Sequence[str], flag: str) -> bool:
    """Return whether a command line sets the flag, perhaps abbreviated."""
    return any(abbreviates(word, flag) for word in words)


def new_admin_key() -> str:
    """Return a key for one engine. It has letters and digits alone: one that begins as a flag ends the engine (H64)."""
    return secrets.token_hex(24)


def engine_config(admin_key: str) -> str:
    """Return the engine's configuration file (YAML), for values that must not stand on a command line."""
    return f'admin-api-key: "{admin_key}"\n'


class _EngineAnswer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class ModelInfo(_EngineAnswer):
    """The HTTP process reports these weights (H54: after a failed update the scheduler may know better)."""

    weight_version: str
    model_path: str


class _MemoryUsage(_EngineAnswer):
    """This is the memory of one device, in GiB."""

    weight: float = 0.0
    kvcache: float = 0.0
    token_capacity: int | None = None


class _InternalState(_EngineAnswer):
    memory_usage: _MemoryUsage = _MemoryUsage()


class ServerInfo(_EngineAnswer):
    """The few fields of `/server_info` that are looked at; all others, keys among them, are dropped when parsing."""

    version: str
    host: str = LOOPBACK
    frontend: str = "python"
    enable_memory_saver: bool
    dp_size: int
    tp_size: int
    pp_size: int
    tokenizer_worker_num: int
    incremental_streaming_output: bool
    skip_tokenizer_init: bool
    delete_ckpt_after_loading: bool
    enable_hierarchical_cache: bool
    disaggregation_mode: str
    weight_cache_mode: str = "off"
    max_queued_requests: int | None = None
    dtype: str = "auto"
    context_length: int | None = None  # tokens of prompt and response; None: the model's
    quantization: str | None = None
    internal_states: tuple[_InternalState, ...] = ()

    @property
    def pool_tokens(self) -> int | None:
        """Return the size of the KV pool in tokens; None: the engine does not report it."""
        return self.internal_states[0].memory_usage.token_capacity if self.internal_states else None

    def mapped_bytes(self, tags: Collection[str]) -> int | None:
        """Return the bytes that weights and KV pool, if among the tags, map on each device; None: not reported."""
        usage = self.internal_states[0].memory_usage if self.internal_states else _MemoryUsage()
        sizes = {WEIGHTS: usage.weight, KV_CACHE: usage.kvcache}
        return int(sum(size for tag, size in sizes.items() if tag in tags) * GIB) or None


class UpdateAnswer(_EngineAnswer):
    success: bool
    message: str = ""


class _RankChecksums(_EngineAnswer):
    checksums: Mapping[str, str]  # by parameter


class ChecksumAnswer(_EngineAnswer):
    """Holds checksums over all ranks. Names and layout are the engine's own: engines of one shape are comparable."""

    success: bool
    message: str = ""
    per_engine_checksum: str | None = None
    ranks: tuple[_RankChecksums, ...] = ()

    def by_parameter(self) -> dict[str, tuple[str, ...]]:
        """Return the checksums of each parameter, one for each rank that holds a part of it."""
        found: dict[str, tuple[str, ...]] = {}
        for rank in self.ranks:
            for name, checksum in rank.checksums.items():
                found[name] = (*found.get(name, ()), checksum)
        return found


class _InputLogprobs(_EngineAnswer):
    input_token_logprobs: tuple[tuple[float | None, int, Any], ...] = Field(default=())


class _Generated(_EngineAnswer):
    meta_info: _InputLogprobs


class SGLang:
    """An SGLang is the client of one engine incarnation. call_s: deadline of each call."""

    def __init__(self, session: aiohttp.ClientSession, *, url: str, admin_key: str, call_s: float) -> None:
        self._session = session
        self._headers = {"Authorization": f"Bearer {admin_key}"}
        self._call_s = call_s
        self.url = url

    # ------------------------------------------------------------------------------------------------ what it is
    async def is_up(self) -> bool:
        """Return whether it is started and healthy, paused or not. Raises OutcomeUnknown while nothing listens."""
        return await self._status("/ping") == 200

    async def takes_requests(self) -> bool:
        """Return whether it is up and not paused; up without this means paused. Raises OutcomeUnknown."""
        return await self._status("/ready") == 200

    async def model_info(self) -> ModelInfo:
        return read_answer(ModelInfo, await self._call("GET", "/model_info"), "/model_info")

    async def weight_version(self) -> WeightVersion:
        """Return the version of its weights. Raises CallRefused if it has no version of ours (H22)."""
        info = await self.model_info()
        try:
            return WeightVersion.parse(info.weight_version)
        except ValueError as error:
            raise CallRefused(f"engine serves {info.model_path}: {error}") from error

    async def require_suitable(self, *, memory_saver: bool, gpus: int) -> ServerInfo:
        """Return the engine's settings. Raises Unsuitable with the flag or the package to change.

        memory_saver: whether it must have one. gpus: devices that are this engine's, in all of its pods, all of which
        it must span: on others nothing would come free in a switch.
        """
        try:
            info = ServerInfo.model_validate(await self._call("GET", "/server_info"))
        except ValidationError as error:
            missing = ", ".join(".".join(map(str, item["loc"])) for item in error.errors(include_input=False))
            raise Unsuitable(f"/server_info lacks {missing}: use SGLang {' or '.join(SGLANG.versions)}") from None
        spanned = info.tp_size * info.pp_size
        for wrong, remedy in (
            (
                info.version not in SGLANG.versions,
                f"SGLang {info.version} is not known: use {SGLANG.versions[-1]}",
            ),
            (info.frontend != "python", "unset SGLANG_RUST_SERVER: only the Python HTTP server is supported"),
            (
                memory_saver and not info.enable_memory_saver,
                "--enable-memory-saver is off: releasing would free nothing",
            ),
            (info.dp_size != 1, "--dp-size must be 1: use more replicas instead"),
            (
                gpus > 0 and spanned != gpus,
                f"it spans {spanned} of its {gpus} devices: leave --tp-size and --pp-size out of engine.args, or let "
                "their product be gpus.count times engine.pods, divided by engine.perPod; for smaller engines raise "
                "engine.perPod",
            ),
            (info.tokenizer_worker_num != 1, "--tokenizer-worker-num must be 1: a pause would return early"),
            (info.incremental_streaming_output, "remove --incremental-streaming-output: aborts would repeat a token"),
            (info.skip_tokenizer_init, "remove --skip-tokenizer-init"),
            (info.delete_ckpt_after_loading, "remove --delete-ckpt-after-loading: exports belong to the trainer"),
            (info.enable_hierarchical_cache, "remove --enable-hierarchical-cache: not supported with release"),
            (info.disaggregation_mode != "null", "remove --disaggregation-mode: not supported"),
            (info.weight_cache_mode != "off", "--weight-cache-mode must be off with release"),
            (info.max_queued_requests is not None, "remove --max-queued-requests: its aborts look like a switch"),
            (info.host != LOOPBACK, f"--host must be {LOOPBACK}: only the agent of the pod may reach the engine"),
        ):
            if wrong:
                raise Unsuitable(remedy)
        return info

    async def vocabulary(self) -> int | None:
        """Return the number of token ids it knows: others in a prompt kill it. None: unknown. Don't call while paused.

        No route reports it, but a refusal of a bias for an invalid id does, before the request reaches the scheduler. A
        late answer does no harm: the engine is asked again when it next continues.
        """
        bias = {"max_new_tokens": 1, "logit_bias": {"-1": 0.0}}
        try:
            await self._call("POST", "/generate", {"input_ids": [0], "sampling_params": bias})
        except CallRefused as refusal:
            known = re.search(r"logit_bias .* in \[0, (\d+)\]", refusal.detail)
            return int(known[1]) + 1 if known else None
        except OutcomeUnknown:
            return None
        return None

    # ------------------------------------------------------------------------------------------------ a switch
    async def abort_all(self) -> None:
        await self._call("POST", "/abort_request", {"rid": "", "abort_all": True})

    async def abort(self, rid: str) -> None:
        await self._call("POST", "/abort_request", {"rid": rid, "abort_all": False})

    async def pause(self) -> None:
        """Pause generation. Call it when nothing is in flight: it takes whole seconds otherwise (H55)."""
        await self._call("POST", "/pause_generation", {"mode": "abort"})

    async def flush(self) -> None:
        """Flush the cache: success proves an idle scheduler. Raises CallRefused if it is not idle by the deadline."""
        await self._call("POST", f"/flush_cache?timeout={self._call_s * FLUSH_MARGIN:g}", {})

    async def release(self, tags: Sequence[str]) -> None:
        """Release memory. Call it only when drained, and never twice: either mistake kills the engine (H2, H10)."""
        await self._call("POST", "/release_memory_occupation", {"tags": list(tags)})

    async def resume(self, tags: Sequence[str]) -> None:
        """Resume memory. Name only tags that were released: others kill the engine."""
        await self._call("POST", "/resume_memory_occupation", {"tags": list(tags)})

    async def update(self, directory: Path, version: WeightVersion, *, deadline_s: float | None = None) -> None:
        """Load an export whose files were verified (H51). Raises CallRefused; the weights are unknown then (H54).

        deadline_s: that of any other call if None.
        """
        body = {
            "model_path": str(directory),
            "weight_version": str(version),
            "flush_cache": True,
            "abort_all_requests": False,
        }
        path = "/update_weights_from_disk"
        answer = read_answer(UpdateAnswer, await self._call("POST", path, body, deadline_s=deadline_s), path)
        if not answer.success:
            raise CallRefused(f"update to {version}: it did not succeed; {SEE_LOG}", detail=answer.message)

    async def checksum(self) -> tuple[str, dict[str, tuple[str, ...]]]:
        """Return the checksum of the weights in memory, and those of each parameter. Raises CallRefused.

        The memory must not be released.
        """
        path = "/weights_checker"  # its other actions overwrite weights
        answer = read_answer(ChecksumAnswer, await self._call("POST", path, {"action": "checksum"}), path)
        if not answer.success or answer.per_engine_checksum is None:
            raise CallRefused(f"checksum of the weights: none was given; {SEE_LOG}", detail=answer.message)
        return answer.per_engine_checksum, answer.by_parameter()

    async def continue_(self) -> None:
        await self._call("POST", "/continue_generation", {})

    async def repair(self) -> None:
        """Run a health probe: after one failed during a pause, the engine refuses requests until one succeeds (H56)."""
        await self._call("GET", "/health_generate")

    async def input_logprobs(self, input_ids: Sequence[int]) -> tuple[float, ...]:
        """Return the log-probability of each token but the first given those before it, temperature 1, in nats."""
        body = {
            "input_ids": list(input_ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        answer = read_answer(_Generated, await self._call("POST", "/generate", body), "/generate")
        found = answer.meta_info.input_token_logprobs
        if [token for _, token, _ in found] != list(input_ids):
            raise CallRefused(f"log-probabilities of {len(found)} tokens for a sequence of {len(input_ids)}")
        return tuple(logprob for logprob, _, _ in found[1:] if logprob is not None)

    # ------------------------------------------------------------------------------------------------ transport
    async def _status(self, path: str) -> int:
        async with within(self._call_s, path), self._session.get(self.url + path, headers=self._headers) as answer:
            return answer.status

    async def _call(
        self, method: Method, path: str, body: dict[str, Any] | None = None, *, deadline_s: float | None = None
    ) -> Any:
        """Return the parsed answer of a 200. Raises CallRefused, OutcomeUnknown."""
        call = path.partition("?")[0]
        async with (
            within(self._call_s if deadline_s is None else deadline_s, call),
            self._session.request(method, self.url + path, json=body, headers=self._headers) as answer,
        ):
            text = await read_body(answer, call, most_bytes=MAX_ANSWER_BYTES)
        if answer.status != 200:
            detail = text[:MAX_ERROR_BYTES].decode(errors="replace")
            raise CallRefused(f"{call}: HTTP {answer.status}, {len(text)} bytes; {SEE_LOG}", detail=detail)
        if answer.content_type != "application/json":
            return None
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise OutcomeUnknown(f"{call} answered with {len(text)} bytes that are not JSON") from None
