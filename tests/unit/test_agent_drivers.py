"""These tests show how engines and trainers are started, and how their answers are read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from colocated_rl_agent.drivers.base import CallRefused, OutcomeUnknown, Unsuitable
from colocated_rl_agent.drivers.sglang import (
    PARALLELISM,
    POOL,
    PREFILL_GRAPHS,
    EngineCommand,
    PartPlace,
    SGLang,
    engine_command,
    engine_config,
    new_admin_key,
    undivided_heads,
)
from colocated_rl_agent.drivers.trainer import MAX_STATUS_BYTES, TrainerRank, trainer_environment
from colocated_rl_agent.lanes.engine import update_deadline_s
from colocated_rl_agent.planner.views import (
    CUDA_GRAPH,
    KV_CACHE,
    TAGS,
    WEIGHTS,
)
from colocated_rl_agent.settings import read_settings
from colocated_rl_api import names
from colocated_rl_api.engines import SGLANG
from colocated_rl_api.facts import TrainerState
from colocated_rl_api.job import Switch
from colocated_rl_api.member_wire import Rendezvous
from colocated_rl_api.rungs import WeightVersion
from colocated_rl_api.trainer_wire import Standstill, TrainerEnvironment
from colocated_rl_api.weights import TensorEntry
from colocated_rl_member.settings import SettingsError
from colocated_rl_trainer.conformance.ranks import free_port
from fakes.engine import VOCABULARY, FakeEngine
from fakes.pod import make_job
from fakes.rollout import make_spec
from fakes.weights import write_export

VERSION = WeightVersion(0, 1)
PATIENT_S = 60.0  # for what is answered, however slow the machine
SOON_S = 0.02  # for what never is
PROGRESS_S = 4.0  # by the clock of a trainer's step


def make_command(
    gpus: int,
    *extra: str,
    saved_tags: Sequence[str] | None = None,
    pool_tokens: int | None = None,
    place: PartPlace | None = None,
) -> EngineCommand:
    return engine_command(
        model=Path("/weights/0-1"),
        version=VERSION,
        port=30000,
        config=Path("/c.yaml"),
        gpus=gpus,
        saved_tags=(TAGS if gpus else ()) if saved_tags is None else saved_tags,
        extra=extra,
        pool_tokens=pool_tokens,
        place=place,
    )


def test_h22_h48_h60_engine_listens_on_loopback_and_names_its_version_from_the_start() -> None:
    argv = " ".join(make_command(0, "--dtype", "float32").argv)
    for words in ("--host 127.0.0.1", "--weight-version 0-1", "--model-path /weights/0-1", "--sleep-on-idle"):
        assert words in argv
    assert argv.endswith("--dtype float32")


def test_h65_processes_of_an_engine_meet_on_the_loopback_whatever_trainers_are_told() -> None:
    assert "lo" == make_command(2).env["GLOO_SOCKET_IFNAME"]


def test_engines_report_experts_where_training_replays_them() -> None:
    flag = "--enable-return-routed-experts"
    assert [] == make_spec().rollout.engine_flags
    assert [flag] == make_spec(routerReplay=True).rollout.engine_flags
    given = {"args": [flag, "--dtype", "float32"]}
    assert [flag, "--dtype", "float32"] == make_spec(routerReplay=True, engine=given).rollout.engine_flags


def test_resident_engine_goes_without_memory_saver_and_its_limits() -> None:
    """Nothing is released, so graphs may be as the engine likes them best."""
    resident = make_command(1, saved_tags=())
    assert "--enable-memory-saver" in make_command(1).argv
    assert not {"--enable-memory-saver", PREFILL_GRAPHS} & {*resident.argv}
    assert "SGLANG_MEMORY_SAVER_CUDA_GRAPH" not in resident.env
    assert "SGLANG_USE_CPU_ENGINE" not in resident.env


def test_cuda_graphs_can_be_released_where_there_are_devices() -> None:
    command = make_command(1)
    assert "1" == command.env["SGLANG_MEMORY_SAVER_CUDA_GRAPH"]
    assert f"{PREFILL_GRAPHS} disabled" in " ".join(command.argv), "breakable graphs can't, and refuse to start"
    for other in (make_command(0), make_command(1, saved_tags=(WEIGHTS, KV_CACHE))):
        assert "SGLANG_MEMORY_SAVER_CUDA_GRAPH" not in other.env
        assert PREFILL_GRAPHS not in other.argv, "graphs that stay may be as the engine likes them best"


def test_replacement_gets_the_pool_of_the_first_engine() -> None:
    assert f"{POOL} 4096" in " ".join(make_command(1, pool_tokens=4096).argv)
    assert POOL not in make_command(1).argv


@pytest.mark.parametrize("given", [(POOL, "512"), (f"{POOL}=512",), ("--max-total", "512")])
def test_pool_that_the_job_sets_stays_what_it_is(given: tuple[str, ...]) -> None:
    assert make_command(1, *given).argv == make_command(1, *given, pool_tokens=4096).argv


def test_engine_spans_all_devices_of_its_pod() -> None:
    """It had one of eight, and a switch found nothing free on the others: README's own job did so."""
    assert "--tp-size 8" in " ".join(make_command(8).argv)
    assert "--tp-size" not in (*make_command(1).argv, *make_command(0).argv)


@pytest.mark.parametrize("given", [("--tp-size=4", "--pp-size", "2"), ("--tensor-parallel-size", "8"), ("--tp", "8")])
def test_parallelism_that_the_job_sets_stays_what_it_is(given: tuple[str, ...]) -> None:
    assert given == make_command(8, *given).argv[-len(given) :]
    assert make_command(1).argv == make_command(8, *given).argv[: -len(given)]


@pytest.mark.parametrize(("address", "at"), [("10.0.0.1", "10.0.0.1:29600"), ("fd00::1", "[fd00::1]:29600")])
def test_part_of_an_engine_over_pods_meets_the_others_at_the_first(address: str, at: str) -> None:
    place = PartPlace(rank=1, pods=2, address=address, port=29600, interface="eth0")
    for gpus, ranks in ((0, 2), (8, 16)):
        command = make_command(gpus, place=place)
        line = " ".join(command.argv)
        assert f"--tp-size {ranks}" in line
        assert f"--nnodes 2 --node-rank 1 --dist-init-addr {at}" in line
        assert ("eth0", "eth0") == (command.env["GLOO_SOCKET_IFNAME"], command.env["NCCL_SOCKET_IFNAME"])


def test_heads_that_an_engine_over_pods_can_not_divide_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 28, "num_key_value_heads": 4}))
    found = undivided_heads(tmp_path, gpus=16, of=8, extra=())
    assert "rollout.engine.pods times the 8 devices of a pod be 2 or 4" in str(found)
    assert undivided_heads(tmp_path, gpus=4, of=2, extra=()) is None


@pytest.mark.parametrize(
    ("heads", "shared", "gpus", "fitting"),
    [
        (28, 4, 8, "2 or 4 or 8"),  # Qwen2.5-7B: 4, 2 or 1 devices for an engine
        (28, 4, 4, None),
        (14, 2, 8, "4 or 8"),
        (14, 2, 4, "4 or 8"),
        (64, 8, 8, None),
        (64, 4, 8, None),  # keys and values are repeated
        (28, None, 1, None),
    ],
)
def test_heads_that_no_engine_can_divide_are_named_with_what_can(
    tmp_path: Path, heads: int, shared: int | None, gpus: int, fitting: str | None
) -> None:
    config = {"num_attention_heads": heads, "num_key_value_heads": shared}
    for written in (config, {"text_config": config}):
        (tmp_path / "config.json").write_text(json.dumps(written))
        found = undivided_heads(tmp_path, gpus=gpus, of=8, extra=())
        assert (found is None) if fitting is None else f"perPod to {fitting}, of 8 devices" in str(found)
        assert undivided_heads(tmp_path, gpus=gpus, of=8, extra=("--tp-size=2",)) is None, "the job divides it itself"


@pytest.mark.parametrize("config", [None, "no JSON", "[]", "{}", '{"num_attention_heads": "many"}'])
def test_model_that_says_nothing_of_heads_is_the_engines_to_judge(tmp_path: Path, config: str | None) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    assert undivided_heads(tmp_path, gpus=8, of=8, extra=()) is None


async def test_engine_that_leaves_devices_of_its_pod_idle_is_refused(fake: tuple[FakeEngine, SGLang]) -> None:
    engine, driver = fake
    engine.info = {"tp_size": 4, "pp_size": 2}
    await driver.require_suitable(memory_saver=False, gpus=8)
    engine.info = {"tp_size": 4}
    with pytest.raises(Unsuitable, match="spans 4 of its 8 devices"):
        await driver.require_suitable(memory_saver=False, gpus=8)


def test_every_flag_that_the_agent_sets_is_closed_to_the_job_or_gives_way_to_it() -> None:
    place = PartPlace(rank=1, pods=2, address="10.0.0.1", port=29600, interface="eth0")
    ours = {word for word in make_command(2, pool_tokens=4096, place=place).argv if word.startswith("--")}
    assert ours <= {*SGLANG.owned, PREFILL_GRAPHS, POOL, *PARALLELISM}
    assert 1 == make_command(1, PREFILL_GRAPHS, "full").argv.count(PREFILL_GRAPHS)


@pytest.mark.parametrize("gpus", [0, 1])
def test_environment_that_makes_a_switch_unsafe_is_taken_away(gpus: int) -> None:
    env = make_command(gpus).env
    for name in (
        "SGLANG_RUST_SERVER", "SGLANG_REQ_WAITING_TIMEOUT", "SGLANG_REQ_RUNNING_TIMEOUT", "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF", "SGLANG_RETURN_ORIGINAL_LOGPROB",
    ):  # fmt: skip
        assert env[name] is None


def test_h56_crash_dumps_are_off_and_the_admin_key_is_no_argument() -> None:
    command = make_command(1)
    assert ("0", "0") == (
        command.env["SGLANG_PYSPY_DUMP_BEFORE_CRASH"],
        command.env["SGLANG_CUDA_COREDUMP_BEFORE_CRASH"],
    )
    assert "--admin-api-key" not in command.argv
    assert "secret" in engine_config("secret")


def test_h64_an_admin_key_begins_as_no_flag() -> None:
    """One of 64 keys did, and with it the engine ended before it had started."""
    keys = {new_admin_key() for _ in range(256)}
    assert 256 == len(keys)
    assert {key for key in keys if key.isalnum() and len(key) == 48} == keys


@pytest.fixture
async def fake(tmp_path: Path) -> AsyncIterator[tuple[FakeEngine, SGLang]]:
    write_export(tmp_path / "0-1", version="0-1", weight=0.0)
    engine = FakeEngine(tmp_path / "0-1", "0-1", admin_key="key", memory_saver=False, token_s=0.001)
    async with TestServer(engine.app()) as server, aiohttp.ClientSession() as session:
        yield engine, SGLang(session, url=str(server.make_url("")).rstrip("/"), admin_key="key", call_s=PATIENT_S)


async def test_h43_engine_without_memory_saver_is_refused_where_there_are_devices(
    fake: tuple[FakeEngine, SGLang],
) -> None:
    await fake[1].require_suitable(memory_saver=False, gpus=0)
    with pytest.raises(Unsuitable, match="--enable-memory-saver"):
        await fake[1].require_suitable(memory_saver=True, gpus=1)


@pytest.mark.parametrize(
    ("info", "remedy"),
    [
        ({"version": "0.5.19"}, "use 0.5.23"),
        ({"frontend": "rust"}, "SGLANG_RUST_SERVER"),
        ({"dp_size": 2}, "--dp-size"),  # H19
        ({"tokenizer_worker_num": 4}, "--tokenizer-worker-num"),  # H20
        ({"incremental_streaming_output": True}, "--incremental-streaming-output"),  # H59
        ({"skip_tokenizer_init": True}, "--skip-tokenizer-init"),
        ({"delete_ckpt_after_loading": True}, "--delete-ckpt-after-loading"),
        ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache"),
        ({"disaggregation_mode": "prefill"}, "--disaggregation-mode"),
        ({"weight_cache_mode": "host"}, "--weight-cache-mode"),
        ({"max_queued_requests": 64}, "--max-queued-requests"),  # H8
        ({"host": "0.0.0.0"}, "--host"),  # H60
        ({"dp_size": None}, "dp_size"),
    ],
)
async def test_h19_h20_h42_h59_engine_that_no_switch_is_safe_with_is_refused_by_its_flag(
    fake: tuple[FakeEngine, SGLang], info: dict[str, Any], remedy: str
) -> None:
    engine, driver = fake
    engine.info = info
    with pytest.raises(Unsuitable, match=remedy):
        await driver.require_suitable(memory_saver=False, gpus=0)


async def test_h60_nothing_of_the_keys_is_kept_of_what_the_engine_says(fake: tuple[FakeEngine, SGLang]) -> None:
    assert "key" not in repr(await fake[1].require_suitable(memory_saver=False, gpus=0))


async def test_vocabulary_of_an_engine_is_what_its_refusal_says(fake: tuple[FakeEngine, SGLang]) -> None:
    engine, driver = fake
    assert VOCABULARY == await driver.vocabulary()
    engine.faults["/generate"] = "error"
    assert await driver.vocabulary() is None
    async with aiohttp.ClientSession() as session:
        nobody = SGLang(session, url="http://127.0.0.1:1", admin_key="key", call_s=PATIENT_S)
        assert await nobody.vocabulary() is None


async def test_memory_that_an_engine_does_not_tell_is_unknown(fake: tuple[FakeEngine, SGLang]) -> None:
    engine, driver = fake
    info = await driver.require_suitable(memory_saver=False, gpus=0)
    assert (32768, 50 * 2**30) == (info.pool_tokens, info.mapped_bytes(TAGS))
    assert 40 * 2**30 == info.mapped_bytes((KV_CACHE, CUDA_GRAPH)), "of what is given up"
    engine.info = {"internal_states": []}
    info = await driver.require_suitable(memory_saver=False, gpus=0)
    assert (None, None) == (info.pool_tokens, info.mapped_bytes(TAGS))


async def test_call_that_is_not_answered_has_an_unknown_outcome(fake: tuple[FakeEngine, SGLang]) -> None:
    engine, driver = fake
    engine.faults["/pause_generation"] = "hang"
    async with aiohttp.ClientSession() as session:
        impatient = SGLang(session, url=driver.url, admin_key="key", call_s=SOON_S)
        with pytest.raises(OutcomeUnknown, match=r"/pause_generation not confirmed after 0\.02 s"):
            await impatient.pause()


async def test_an_engine_has_as_long_to_say_that_it_is_there_as_for_any_call(fake: tuple[FakeEngine, SGLang]) -> None:
    """The next agent took one that was busy for longer than two seconds for one that was starting, and ended it."""
    engine, driver = fake
    engine.faults |= {"/ping": "hang", "/ready": "hang"}
    async with aiohttp.ClientSession() as session:
        impatient = SGLang(session, url=driver.url, admin_key="key", call_s=SOON_S)
        for look in (impatient.is_up, impatient.takes_requests):
            with pytest.raises(OutcomeUnknown, match=f"not confirmed after {SOON_S} s"):
                await look()


async def test_update_may_take_longer_than_other_calls(tmp_path: Path, fake: tuple[FakeEngine, SGLang]) -> None:
    engine, driver = fake
    write_export(tmp_path / "0-2", version="0-2", weight=1.0)
    async with aiohttp.ClientSession() as session:
        impatient = SGLang(session, url=driver.url, admin_key="key", call_s=0.0)
        await impatient.update(tmp_path / "0-2", WeightVersion(0, 2), deadline_s=PATIENT_S)
    assert "0-2" == engine.version


@pytest.mark.parametrize(
    ("size_bytes", "switch", "deadline_s"),
    [
        (0, Switch(), 60),
        (15_000_000_000, Switch(), 60 + 150),  # 7B in bfloat16
        (140_000_000_000, Switch(), 900),  # 70B: as long as a start, which reads as much
        (140_000_000_000, Switch(engine_start_seconds=3600), 60 + 1400),
        (15_000_000_000, Switch(engine_call_seconds=600, engine_start_seconds=30), 600),
    ],
)
def test_deadline_of_an_update_follows_from_its_bytes(size_bytes: int, switch: Switch, deadline_s: float) -> None:
    """A right engine was replaced again and again if a large model came from a slow volume."""
    assert deadline_s == update_deadline_s(switch, size_bytes)


@pytest.mark.parametrize(
    ("dtype", "shape", "size_bytes"),
    [("F32", (3, 2), 24), ("BF16", (5,), 10), ("F8_E4M3", (7,), 7), ("BOOL", (4,), 4), ("I64", (), 8), ("F4", (8,), 4)],
)
def test_size_of_a_tensor_follows_from_its_entry(dtype: str, shape: tuple[int, ...], size_bytes: int) -> None:
    assert size_bytes == TensorEntry(dtype=dtype, shape=shape).size_bytes


async def test_engine_that_is_not_there_is_reported_in_words() -> None:
    """A job's status shows it, and the error's `repr` names each field of aiohttp's connection."""
    async with aiohttp.ClientSession() as session:
        driver = SGLang(session, url=f"http://127.0.0.1:{free_port()}", admin_key="key", call_s=PATIENT_S)
        with pytest.raises(OutcomeUnknown, match=r"not confirmed: ClientConnectorError: Cannot connect to host"):
            await driver.pause()


async def test_call_that_is_refused_is_reported_by_status_and_length_and_not_in_the_engines_words(
    fake: tuple[FakeEngine, SGLang],
) -> None:
    engine, driver = fake
    engine.faults["/pause_generation"] = "error"
    with pytest.raises(CallRefused, match=r"^/pause_generation: HTTP 500, 26 bytes; see the engine's log$") as it:
        await driver.pause()
    assert "asked to fail" in it.value.detail


async def test_h22_engine_without_a_version_of_ours_is_refused(fake: tuple[FakeEngine, SGLang]) -> None:
    engine, driver = fake
    engine.shown_version = "default"
    with pytest.raises(CallRefused, match="default"):
        await driver.weight_version()


@pytest.mark.parametrize("answer", [b"{", b"[]", b"null", b"<html>", b"[" * 100_000])
async def test_answer_that_can_not_be_read_has_an_unknown_outcome(answer: bytes) -> None:
    async def serve(request: web.Request) -> web.Response:
        return web.Response(body=answer, content_type="application/json")

    app = web.Application()
    app.router.add_post("/update_weights_from_disk", serve)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        driver = SGLang(session, url=str(server.make_url("")).rstrip("/"), admin_key="key", call_s=PATIENT_S)
        with pytest.raises(OutcomeUnknown):
            await driver.update(Path("/weights/0-1"), VERSION)


async def say_without_end(request: web.Request) -> web.StreamResponse:
    """Good JSON, as far as it goes, until the caller leaves."""
    answer = web.StreamResponse(headers={"Content-Type": "application/json"})
    await answer.prepare(request)
    await answer.write(b'{"message": "')
    while True:
        await answer.write(b"x" * MAX_STATUS_BYTES)


async def test_answer_of_an_engine_without_an_end_is_read_no_further() -> None:
    """The agent read it until its memory ended, or its time."""
    app = web.Application()
    app.router.add_post("/pause_generation", say_without_end)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        driver = SGLang(session, url=str(server.make_url("")).rstrip("/"), admin_key="key", call_s=PATIENT_S)
        with pytest.raises(OutcomeUnknown, match="/pause_generation answered with more than 67108864 bytes"):
            await driver.pause()


# ------------------------------------------------------------------------------------------------------------- trainer
def test_trainer_is_told_its_place_in_the_group() -> None:
    env = trainer_environment(
        socket=Path("/s"),
        config=Path("/c"),
        job=Path("/j"),
        model=Path("/m"),
        checkpoints=Path("/k"),
        lineage=3,
        rank=5,
        local_rank=1,
        rendezvous=Rendezvous(address="10.0.0.9", port=29503, world_size=8),
        gpus=4,
    )
    assert env[TrainerEnvironment.FORMER] is None
    assert set(TrainerEnvironment) == set(env)
    assert ("5", "8", "1", "10.0.0.9", "29503", "cuda:1", "3") == tuple(
        env[name]
        for name in (
            TrainerEnvironment.RANK,
            TrainerEnvironment.WORLD_SIZE,
            TrainerEnvironment.LOCAL_RANK,
            TrainerEnvironment.MASTER_ADDR,
            TrainerEnvironment.MASTER_PORT,
            TrainerEnvironment.DEVICE,
            TrainerEnvironment.LINEAGE,
        )
    )


@pytest.fixture
async def answering(tmp_path: Path) -> AsyncIterator[tuple[dict[str, Any], TrainerRank]]:
    """A trainer that answers what the test puts into the first part."""
    response: dict[str, Any] = {}

    async def answer(request: web.Request) -> web.Response:
        return web.json_response(response["body"], status=response.get("status", 200))

    app = web.Application()
    app.add_routes([web.get("/v1/state", answer), web.post("/v1/train", answer)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / "t.sock")).start()
    rank = TrainerRank(tmp_path / "t.sock", progress_s=PATIENT_S)
    yield response, rank
    await rank.close()
    await runner.cleanup()


async def test_status_of_a_trainer_is_read(answering: tuple[dict[str, Any], TrainerRank]) -> None:
    response, rank = answering
    response["body"] = {"state": "Onloaded", "rank": 0, "lineage": 2, "step": 7, "exported": "7-2"}
    status = await rank.status()
    assert (TrainerState.ONLOADED, WeightVersion(7, 2)) == (status.state, status.exported)


async def test_refusal_of_a_trainer_comes_in_its_words(answering: tuple[dict[str, Any], TrainerRank]) -> None:
    response, rank = answering
    response |= {"status": 409, "body": {"error": "WrongStep", "message": "stands at 3"}}
    with pytest.raises(CallRefused, match="WrongStep: stands at 3"):
        await rank.train(9, Path("/shard"))


async def test_trainer_that_says_it_is_not_there_is_unsuitable(answering: tuple[dict[str, Any], TrainerRank]) -> None:
    """It was believed: the engine took the devices back beside it."""
    response, rank = answering
    response["body"] = {"state": "Absent", "rank": 0, "lineage": 2}
    with pytest.raises(Unsuitable, match="answered that it is Absent"):
        await rank.status()


async def test_answer_of_a_trainer_without_an_end_is_read_no_further(tmp_path: Path) -> None:
    app = web.Application()
    app.router.add_post("/v1/train", say_without_end)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / "t.sock")).start()
    rank = TrainerRank(tmp_path / "t.sock", progress_s=PATIENT_S)
    with pytest.raises(OutcomeUnknown, match="/v1/train answered with more than 1048576 bytes"):
        await rank.train(1, Path("/shard"))
    await rank.close()
    await runner.cleanup()


async def test_trainer_of_another_protocol_is_unsuitable(answering: tuple[dict[str, Any], TrainerRank]) -> None:
    response, rank = answering
    response["body"] = {"protocol": 9, "state": "Onloaded", "rank": 0, "lineage": 2}
    with pytest.raises(Unsuitable, match="protocol 9"):
        await rank.status()


@pytest.fixture
async def working(tmp_path: Path) -> AsyncIterator[tuple[dict[str, Any], Path]]:
    """A trainer in the middle of a step: `done` ends it, `progress` is what it says of it; None: nothing at all.

    `now`: a clock that goes on by a second with each look at it.
    """
    step: dict[str, Any] = {"done": asyncio.Event(), "progress": 0, "now": 0.0}

    def status() -> web.Response:
        body = {"state": "Training", "rank": 0, "lineage": 1, "progress": step["progress"]}
        body["standstill"] = step.get("standstill")
        return web.json_response(body)

    async def train(request: web.Request) -> web.Response:
        await step["done"].wait()
        return status()

    async def state(request: web.Request) -> web.Response:
        step["now"] += 1
        if step["progress"] is None:
            await step["done"].wait()
        else:
            step["progress"] += step.get("pace", 0)
            if step["progress"] > PROGRESS_S:
                step["done"].set()
        return status()

    app = web.Application()
    app.add_routes([web.get("/v1/state", state), web.post("/v1/train", train)])
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / "t.sock")).start()
    yield step, tmp_path / "t.sock"
    step["done"].set()
    await runner.cleanup()


async def train_in(
    step: dict[str, Any], socket: Path, *, heartbeat_s: float = SOON_S, lease_s: float = 2 * PROGRESS_S, **more: Any
) -> Any:
    """Train a step. heartbeat_s: also what an answer about a step may take."""
    rank = TrainerRank(
        socket,
        progress_s=PROGRESS_S,
        heartbeat_s=heartbeat_s,
        lease_s=lease_s,
        clock=lambda: float(step["now"]),
        **more,
    )
    try:
        return await rank.train(1, Path("/shard"))
    finally:
        await rank.close()


async def test_step_takes_as_long_as_it_makes_progress(working: tuple[dict[str, Any], Path]) -> None:
    step, socket = working
    step["pace"] = 1
    await train_in(step, socket, heartbeat_s=5 * SOON_S)
    assert step["now"] > PROGRESS_S, "longer than its deadline without progress"


async def test_step_without_progress_ends_at_its_deadline(working: tuple[dict[str, Any], Path]) -> None:
    with pytest.raises(OutcomeUnknown, match=r"no progress for 4 s"):
        await train_in(*working)


async def test_step_without_progress_says_where_it_stands(working: tuple[dict[str, Any], Path]) -> None:
    step, socket = working
    step["standstill"] = {"seconds": 4.0, "where": "all_reduce (group.py:7) < train (loop.py:9)"}
    with pytest.raises(OutcomeUnknown, match=r"no progress for 4 s, it is in all_reduce \(group.py:7\) < train"):
        await train_in(step, socket, heartbeat_s=5 * SOON_S)


@pytest.mark.parametrize(
    ("seconds", "usual_s", "expected"),
    [(60.0, 6.0, True), (59.9, 0.1, False), (60.0, 6.1, False), (900.0, 90.0, True), (900.0, None, False)],
)
async def test_step_stalls_when_it_stands_still_for_far_longer_than_usual(
    working: tuple[dict[str, Any], Path], seconds: float, usual_s: float | None, expected: bool
) -> None:
    step, socket = working
    step["standstill"] = {"seconds": seconds, "usualS": usual_s, "moved": 3}
    told: list[Standstill | None] = []
    with pytest.raises(OutcomeUnknown):
        await train_in(step, socket, heartbeat_s=5 * SOON_S, stalls=told.append)
    *during, after = told
    assert after is None
    assert {3 if expected else None} == {each and each.moved for each in during}


async def test_h45_trainer_that_gives_no_sign_of_life_loses_its_lease(working: tuple[dict[str, Any], Path]) -> None:
    step, socket = working
    step["progress"] = None
    with pytest.raises(OutcomeUnknown, match=r"no sign of life for 2 s"):
        await train_in(step, socket, lease_s=2)


async def test_trainer_that_does_not_listen_yet_is_unknown(tmp_path: Path) -> None:
    rank = TrainerRank(tmp_path / "none.sock", progress_s=5)
    with pytest.raises(OutcomeUnknown):
        await rank.status()
    await rank.close()


# ------------------------------------------------------------------------------------------------------------ settings
ENVIRONMENT = {names.ENV_POD_NAME: "job-gpu-1-0", names.ENV_POD_UID: "u", names.ENV_REPLICA: "1"}


def write_job(root: Path, **changes: Any) -> None:
    path = root / names.JOB_FILE.lstrip("/")
    path.parent.mkdir(parents=True)
    path.write_text(make_job(**changes).model_dump_json(by_alias=True))


def test_ranks_of_a_pod_follow_those_of_the_pods_before_it(tmp_path: Path) -> None:
    write_job(tmp_path, gpus={"count": 4})
    settings = read_settings(["--root", str(tmp_path)], ENVIRONMENT)
    assert [4, 5, 6, 7] == list(settings.ranks)


def test_pod_without_devices_has_one_rank(tmp_path: Path) -> None:
    write_job(tmp_path)
    assert [1] == list(read_settings(["--root", str(tmp_path)], ENVIRONMENT).ranks)


@pytest.mark.parametrize(
    ("role", "replica", "gpus", "ranks", "tends", "reads"),
    [
        (names.ROLE_TRAINER, 0, 2, [0, 1], True, True),
        (names.ROLE_TRAINER, 1, 2, [2, 3], False, False),
        (names.ROLE_ENGINE, 0, 4, [], False, True),
        (names.ROLE_ENGINE, 1, 4, [], False, True),
    ],
)
def test_pods_with_one_side_have_its_devices_and_rank_0_alone_tends_the_exports(
    tmp_path: Path, role: str, replica: int, gpus: int, ranks: list[int], tends: bool, reads: bool
) -> None:
    write_job(tmp_path, gpus={"count": 2}, rollout={"placement": "OwnDevices", "replicas": 2, "gpus": {"count": 4}})
    here = {names.ENV_ROLE: role, names.ENV_REPLICA: str(replica)}
    settings = read_settings(["--root", str(tmp_path)], ENVIRONMENT | here)
    assert (gpus, ranks) == (settings.gpus, list(settings.ranks))
    assert (tends, reads) == (settings.tends_exports, settings.reads_exports)
    assert settings.has_engine == (role == names.ROLE_ENGINE)


@pytest.mark.parametrize(
    ("role", "replica", "ranks", "tends", "borrows", "releases"),
    [
        (names.ROLE_GPU, 0, [0, 1], True, False, True),
        (names.ROLE_GPU, 1, [2, 3], False, True, True),
        (names.ROLE_ENGINE, 0, [], False, False, False),
    ],
)
def test_of_a_mixed_job_engines_beside_trainers_release_memory_and_read_what_rank_0_has_written(
    tmp_path: Path, role: str, replica: int, ranks: list[int], tends: bool, borrows: bool, releases: bool
) -> None:
    write_job(tmp_path, gpus={"count": 2}, rollout={"placement": "Both", "replicas": 1})
    here = {names.ENV_ROLE: role, names.ENV_REPLICA: str(replica)}
    settings = read_settings(["--root", str(tmp_path)], ENVIRONMENT | here)
    assert (2, ranks, True, True) == (
        settings.gpus, list(settings.ranks), settings.has_engine, settings.reads_exports,
    )  # fmt: skip
    assert (tends, borrows) == (settings.tends_exports, settings.borrows_exports)
    assert releases == bool(settings.saved_tags) == settings.rules.releases


def test_trainers_that_nobody_reads_from_tend_the_exports_of_their_own_pod(tmp_path: Path) -> None:
    write_job(
        tmp_path,
        mode="TrainOnly",
        recorded={"claimName": "recording"},
        rollout={"placement": "OwnDevices", "replicas": 1},
    )
    settings = read_settings(["--root", str(tmp_path)], ENVIRONMENT | {names.ENV_ROLE: names.ROLE_TRAINER})
    assert (True, False) == (settings.tends_exports, settings.has_engine)


def test_unknown_role_is_named(tmp_path: Path) -> None:
    write_job(tmp_path)
    with pytest.raises(SettingsError, match="COLOCATE_ROLE is 'judge': one of gpu, trainer, engine"):
        read_settings(["--root", str(tmp_path)], ENVIRONMENT | {names.ENV_ROLE: "judge"})


@pytest.mark.parametrize("missing", list(ENVIRONMENT))
def test_missing_variable_is_named(tmp_path: Path, missing: str) -> None:
    write_job(tmp_path)
    environment = {name: value for name, value in ENVIRONMENT.items() if name != missing}
    with pytest.raises(SettingsError, match=missing):
        read_settings(["--root", str(tmp_path)], environment)


def test_missing_and_broken_job_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"job\.json can't be read"):
        read_settings(["--root", str(tmp_path)], ENVIRONMENT)
    write_job(tmp_path)
    (tmp_path / names.JOB_FILE.lstrip("/")).write_text('{"name": 3}')
    with pytest.raises(SettingsError, match=r"job\.json"):
        read_settings(["--root", str(tmp_path)], ENVIRONMENT)
