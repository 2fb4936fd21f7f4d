"""A job may give its engine these flags: they are judged before anything is made of the job, and not by the schema."""

from __future__ import annotations

from typing import Any

import pytest

from builders import MIXED_ROLLOUT, OWN_ROLLOUT, ROLLOUT, make_job, make_manifest
from colocated_rl_api.engines import SERVERS, dtype_of, overflowing, refusals
from colocated_rl_api.job import EngineType
from colocated_rl_cli.base.yaml_text import written
from colocated_rl_cli.manifest.manifest import judge
from colocated_rl_operator.clients.errors import JobInvalid
from colocated_rl_operator.loop.observe import read_job

OWNED = "is or abbreviates a flag of SGLang 0.5.23 that the operator sets, that no switch survives or that is not"
TOGETHER = "are on the GPUs together: add --mem-fraction-static and its value, so that the engine leaves room for"
ROOM = f"with offload [] engine and trainer {TOGETHER} trainer"
BESIDE_ROOM = f"with reference.placement WithRollout engine and reference {TOGETHER} reference"
ALL_ROOM = (
    f"with offload [] and reference.placement WithRollout engine and trainer and reference {TOGETHER} trainer and "
    "reference"
)
STAY: dict[str, Any] = {"gpus": {"count": 1}, "rollout": {"offload": []}}
ALL_STAY: dict[str, Any] = STAY | {"reference": {"placement": "WithRollout"}}
BESIDE: dict[str, Any] = {
    "gpus": {"count": 1},
    "rollout": {"placement": "OwnDevices", "replicas": 1},
    "reference": {"placement": "WithRollout"},
}


def spec(*args: str, **fields: Any) -> dict[str, Any]:
    rollout = ROLLOUT | fields.pop("rollout", {}) | {"engine": {"args": list(args)}}
    return {**fields, "rollout": rollout}


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        (spec("--tp-size", "1", "--port"), "args[2]", f"--port {OWNED}"),
        (spec("--model-path=/tmp/x"), "args[0]", f"--model-path=/tmp/x {OWNED}"),
        (spec("--tp-size", "1", "--enable-mem"), "args[2]", f"--enable-mem {OWNED}"),
        (spec("--"), "args[0]", f"-- {OWNED}"),
        (spec("--quantization=fp8"), "args[0]", f"--quantization=fp8 {OWNED}"),
        (spec("--tp-size 8"), "args[0]", "--tp-size 8 is more than one word: write --flag=value, or two items"),
        (spec(**STAY), "args", ROOM),
        (spec("--dtype=bfloat16", **STAY), "args", ROOM),
        (spec(**STAY, reference={}), "args", ROOM),
        (spec(**ALL_STAY), "args", ALL_ROOM),
        (spec(**ALL_STAY, mode="RolloutOnly"), "args", BESIDE_ROOM),
        (spec(**BESIDE), "args", BESIDE_ROOM),
        (spec(**BESIDE, mode="RolloutOnly"), "args", BESIDE_ROOM),
    ],
)
def test_flags_that_an_engine_can_t_be_given_are_refused_by_the_command_line_and_by_the_operator_alike(
    fields: dict[str, Any], field: str, words: str
) -> None:
    manifest = make_manifest(**fields)
    [fault] = judge(written(manifest)).faults
    assert fault.message.startswith(words)
    assert not words.startswith("with ") or words == fault.message
    assert f"spec.rollout.engine.{field}" == fault.field
    shown = f"spec.rollout.engine.{field.replace('[', '.').replace(']', '')}: {fault.message}"
    stored = {**manifest, "metadata": manifest["metadata"] | {"namespace": "default", "uid": "u", "generation": 1}}
    with pytest.raises(JobInvalid) as refused:
        read_job(stored | {"metadata": stored["metadata"] | {"creationTimestamp": "2026-01-01T00:00:00Z"}})
    assert shown == str(refused.value)


@pytest.mark.parametrize(
    "fields",
    [
        spec("--tp-size", "1", "--mem-fraction-static=0.8", "-x", "--dtype=bfloat16"),
        spec("--json-model-override-args={\"a\": 1}"),
        spec("--mem-fraction-static=0.4", **STAY),
        spec("--max-total-tokens", "4096", **STAY),
        spec(**STAY, mode="RolloutOnly"),
        spec("--mem-fraction-static", "0.6", **BESIDE),
        spec("--mem-fraction-static", "0.3", **ALL_STAY),
        spec(**ALL_STAY, mode="TrainOnly", recorded={"claimName": "recording"}),
        spec(**BESIDE, mode="TrainOnly", recorded={"claimName": "recording"}),
        spec(**BESIDE | {"gpus": {"count": 0}}),
        spec(**BESIDE | {"reference": {"placement": "OwnDevices", "replicas": 1}}),
        spec(gpus={"count": 0}, rollout={"offload": []}),
        spec(gpus={"count": 1}, rollout={"offload": [], "placement": "OwnDevices", "replicas": 1}),
    ],
)  # fmt: skip
def test_other_flags_are_the_engine_s_own_affair(fields: dict[str, Any]) -> None:
    assert [] == [*refusals(make_job(**fields).spec)]


@pytest.mark.parametrize(
    ("args", "place"),
    [
        (["--speculative-algorithm=EAGLE"], 0),
        (["--speculative-algorithm", "EAGLE3"], 0),
        (["--tp-size", "1", "--speculative-al=STANDALONE"], 2),
        (["--speculative-algorithm"], 0),
    ],
)
def test_h62_tokens_are_not_guessed_by_a_second_model(args: list[str], place: int) -> None:
    [refused] = refusals(make_job(**spec(*args)).spec)
    assert ("rollout", "engine", "args", place) == refused.field
    assert "guesses tokens by a second model" in refused.message
    assert refused.message.endswith("use NGRAM, or remove it")


@pytest.mark.parametrize(
    "args",
    [
        ["--speculative-algorithm=NGRAM"],
        ["--speculative-algorithm", "NGRAM", "--speculative-attention-mode", "decode"],
        ["--speculative-num-draft-tokens=4"],
    ],
)
def test_tokens_may_be_guessed_from_what_there_is(args: list[str]) -> None:
    assert [] == [*refusals(make_job(**spec(*args)).spec)]


def test_h63_collectives_register_no_graphs() -> None:
    container = {
        "name": "gpu",
        "env": [{"name": "NCCL_DEBUG", "value": "INFO"}, {"name": "NCCL_GRAPH_REGISTER", "value": "1"}],
    }
    template = {"spec": {"containers": [container]}}
    for job, role in (
        (make_job(podTemplates={"gpu": template}), "gpu"),
        (make_job(podTemplates={"gpu": template, "engine": template}, rollout=OWN_ROLLOUT), "engine"),
    ):
        [refused] = refusals(job.spec)
        assert ("podTemplates", role, "spec", "containers", 0, "env", 1, "name") == refused.field
        assert refused.message.startswith("NCCL_GRAPH_REGISTER is set by the engine, and with released memory NCCL")
    both = make_job(podTemplates={"gpu": template, "engine": template}, rollout=MIXED_ROLLOUT)
    assert ["gpu", "engine"] == [each.field[1] for each in refusals(both.spec)]


OWN_TRAINER = {"command": ["python3", "train.py"]}


@pytest.mark.parametrize("args", [["--dtype=float16"], ["--dtype", "half"], ["--dty=float16"]])
def test_weights_are_not_made_float16_of_what_the_default_trainer_exports(args: list[str]) -> None:
    [refused] = refusals(make_job(**spec(*args)).spec)
    assert ("rollout", "engine", "args", 0) == refused.field
    assert refused.message.startswith("float16 has not the range of weights exported as BF16 or F32")
    assert [] == [*refusals(make_job(**spec(*args), trainer=OWN_TRAINER).spec)], "it may export float16"
    assert [] == [*refusals(make_job(**spec(*args), mode="RolloutOnly").spec)], "nothing is exported"


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float32", "float"])
def test_an_engine_may_compute_in_what_has_the_range_of_exports(dtype: str) -> None:
    assert [] == [*refusals(make_job(**spec("--dtype", dtype)).spec)]


@pytest.mark.parametrize(
    ("args", "exported", "fits"),
    [
        (["--dtype=float16"], {"F16"}, True),
        (["--dtype=float16"], {"F16", "BF16"}, False),
        (["--dtype=float16"], {"F32"}, False),
        (["--dtype=float16", "--dtype=bfloat16"], {"BF16"}, True),  # argparse takes the last
        ([], {"BF16"}, True),
        (["--dtype=float16"], set(), True),
    ],
)
def test_an_engine_is_judged_by_the_flag_that_counts_and_by_what_was_exported(
    args: list[str], exported: set[str], fits: bool
) -> None:
    assert fits is (overflowing(dtype_of(args), exported) is None)


def test_every_flag_at_fault_is_named_with_its_place() -> None:
    found = [*refusals(make_job(**spec("--port", "1", "--host=a", "--a b")).spec)]
    assert [("rollout", "engine", "args", place) for place in (0, 2, 3)] == [each.field for each in found]


def test_every_type_of_engine_has_its_flags() -> None:
    assert set(EngineType) == set(SERVERS)
