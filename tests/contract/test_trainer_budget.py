"""These tests compare the budget of a pass with the bytes that torch's allocator counts during that pass."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
import yaml
from allocations import allocated_by
from contract.test_trainer_weights import SPARSE
from contract.trainer_in_process import RankInProcess, peak_and_budget
from contract.trainer_ranks_in_process import UnwatchedTrainer, in_ranks
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from bench.sizes import FILLED, HEAD, MEMORY, MODELS, PAGE, TOKENS, row
from colocated_rl_api.job import ColocatedRLJobSpec
from colocated_rl_api.parts import size_in_bytes
from colocated_rl_trainer.conformance.shards import Example, write_shards
from colocated_rl_trainer.grpo import forecast
from colocated_rl_trainer.grpo.batch import Shard, divide_into_passes
from colocated_rl_trainer.grpo.budget import Budget, gib
from colocated_rl_trainer.grpo.forecast import Forecast, ranks_of
from colocated_rl_trainer.grpo.loop import GRPOTrainer
from colocated_rl_trainer.protocol.settings import TrainerConfig
from colocated_rl_trainer.state import rehearsal
from colocated_rl_trainer.state.rehearsal import Pass, few_of, pass_bytes
from colocated_rl_trainer.state.weights import load_model
from fakes.tiny_model import write_tiny_model
from scenarios.corpus import GPU_EXAMPLES, Case
from setup.layout import CHECKOUT

NEAR = 0.1
ONE_GPU_GIB = 22.0  # what a device of 24 GB reports, or somewhat more
EXPERTS: dict[str, Any] = {
    "vocab_size": 1000, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "moe_intermediate_size": 96, "num_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
ATTENDING: dict[str, Any] = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
GEMMA_2 = transformers.Gemma2Config(**ATTENDING)
GPT_OSS = transformers.GptOssConfig(**ATTENDING, num_local_experts=4, num_experts_per_tok=2)


def held(trainer: GRPOTrainer, *, tokens: int, rows: int = 1) -> int:
    """Bytes of a forward and backward pass over `rows` samples at its peak, beside parameters and gradients."""
    folder = trainer._settings.checkpoints.parent / f"rank-{trainer._settings.rank}"
    folder.mkdir()
    predicted = tokens // rows - 1
    sample = Example([1], [3] * predicted, [-1.0] * predicted, 1.0, 0, 0)
    (path,) = write_shards(folder, [sample] * rows, step=1, split=1)
    shard = Shard.read(path, step=1, shard=0, shards=1)
    (micro,) = divide_into_passes(shard, range(rows), tokens=tokens, packing=False)

    def both() -> None:
        trainer._logp(shard, micro)[0].sum().backward()

    both()  # what is made once has been made
    trainer._state.gradients.zero_()
    return allocated_by(both).peak


def assert_near(found: int, config: PreTrainedConfig, of: Pass) -> None:
    expected = pass_bytes(config, of)
    assert expected is not None
    assert abs(expected - found) < NEAR * found, (expected, found)


@pytest.mark.parametrize(
    "recomputes", [True, pytest.param(False, marks=pytest.mark.release)], ids=["recomputing", "keeping"]
)
def test_pass_of_a_trained_model_on_one_rank(tmp_path: Path, recomputes: bool) -> None:
    """64 tokens take a minute on a core without instructions for bfloat16."""
    model = CHECKOUT.trained_model
    trainer = RankInProcess(tmp_path, model, dtype="bfloat16", activationCheckpointing=recomputes)

    found = held(trainer.loop, tokens=64)

    assert_near(found, AutoConfig.from_pretrained(model), Pass(64, torch.bfloat16, recomputes=recomputes))


@pytest.mark.parametrize("recomputes", [True, False], ids=["recomputing", "keeping"])
def test_pass_of_ranks_that_share_a_model(tmp_path: Path, recomputes: bool) -> None:
    """Gloo copies what it reduces, and lets go of the copies at some time: two may be in the peak.

    The most that it reduces at once are the gradients of embeddings and head, and beside them those of one layer.
    """
    hidden, vocabulary = 256, 2048
    model = write_tiny_model(tmp_path / "model", hidden=hidden, layers=8, tied=False, vocabulary=vocabulary)
    config: dict[str, object] = {"dtype": "bfloat16", "activationCheckpointing": recomputes}
    of = Pass(100, torch.bfloat16, shared_by=2, recomputes=recomputes)
    expected = pass_bytes(AutoConfig.from_pretrained(model), of)
    assert expected is not None

    reduced = 2 * hidden * vocabulary
    layer = 9 * hidden**2  # without its norms
    for found, copied in in_ranks(2, tmp_path, model, partial(held_by_rank, tokens=100, reduced=reduced), **config):
        assert copied == 4 * reduced, "gloo makes no copy any more: leave it out"
        assert (1 - NEAR) * expected < found < (1 + NEAR) * expected + copied + 4 * layer


def held_by_rank(trainer: UnwatchedTrainer, *, tokens: int, reduced: int) -> tuple[int, int]:
    """Return the bytes of a pass, and those that gloo allocates to reduce so many numbers in float32."""
    found = held(trainer, tokens=tokens)
    whole, part = torch.zeros(reduced), torch.zeros(reduced // 2)
    return found, allocated_by(lambda: dist.reduce_scatter_tensor(part, whole)).peak


def test_memory_of_a_sample_grows_with_its_tokens_and_not_with_their_square(tmp_path: Path) -> None:
    """Attention of 2,048 tokens to each other would show beside so small a model; 32 thousand have no more each."""
    model = write_tiny_model(tmp_path / "model", positions=32_768)
    config = AutoConfig.from_pretrained(model)

    assert_near(held(RankInProcess(tmp_path, model).loop, tokens=2048), config, Pass(2048, torch.float32))

    short, long = (pass_bytes(config, Pass(tokens, torch.float32)) for tokens in (2048, 32_768))
    assert short is not None
    assert long is not None
    assert long < 16 * short


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("config", [GEMMA_2, GPT_OSS], ids=["gemma 2", "gpt-oss"])
def test_pass_whose_attention_keeps_scores_takes_the_square_of_its_samples(
    tmp_path: Path, config: PreTrainedConfig, rows: int
) -> None:
    """A job of Gemma 2 was refused for the scores of all samples of a pass with each other; gpt-oss' were left out."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    trainer = RankInProcess(tmp_path, tmp_path / "model", longest=400)

    found = held(trainer.loop, tokens=400, rows=rows)

    read = AutoConfig.from_pretrained(tmp_path / "model")
    assert_near(found, read, Pass(400, torch.float32, longest=400 // rows))


@pytest.mark.parametrize(
    ("longest", "rows"), [(None, (1, 600)), (600, (1, 600)), (500, (1, 500)), (400, (2, 300)), (7, (85, 7))]
)
def test_rows_whose_squares_are_most_are_rehearsed(longest: int | None, rows: tuple[int, int]) -> None:
    passes = Pass(600, torch.float32, longest=longest).rows
    assert max(passes, key=lambda each: each[0] * each[1] ** 2) == rows
    assert max(number * width for number, width in passes) > 600 - 7


def test_pass_of_keys_that_are_wider_than_values_keeps_scores_on_a_cpu_alone(tmp_path: Path) -> None:
    """DeepSeek-V3 was refused on every GPU, whose kernels do not keep them."""
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(**{**ATTENDING, **SPARSE, "num_hidden_layers": 3, "qk_nope_head_dim": 16})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")

    found = held(RankInProcess(tmp_path, tmp_path / "model", longest=400).loop, tokens=400)

    assert_near(found, config, Pass(400, torch.float32, on_cpu=True))
    short, long = (pass_bytes(config, Pass(tokens, torch.float32)) for tokens in (400, 1600))
    assert short is not None
    assert long is not None
    assert long < 4.2 * short


@pytest.mark.parametrize(
    ("kinds", "few"),
    [
        ("e" * 48, (3, 1)),
        ("d" + "e" * 47, (4, 1)),
        ("ddd" + "e" * 58, (6, 1)),  # DeepSeek-V3
        ("llla" * 12, (8, 4)),  # Qwen3-Next
        ("llla" * 12 + "ll", (10, 4)),  # it ends as the whole model does
        ("dllla" + "llla" * 11, (9, 4)),
        ("ab", (4, 1)),  # more than there are: all of them
        ("abcdefg", (9, 1)),
    ],
)
def test_few_layers_that_tell_of_many_end_as_these_do(kinds: str, few: tuple[int, int]) -> None:
    found, a_round = few_of(kinds)
    assert (found, a_round) == few
    if found + a_round < len(kinds):
        assert (len(kinds) - found) % a_round == 0
        assert kinds[found:] == kinds[found - a_round : found] * ((len(kinds) - found) // a_round)


def test_pass_of_layers_of_several_kinds(tmp_path: Path) -> None:
    """GLM-4.5 has three dense layers before its experts: what one of experts takes more counted for each of them."""
    torch.manual_seed(0)
    config = transformers.Glm4MoeConfig(
        **{**ATTENDING, "num_hidden_layers": 8},
        moe_intermediate_size=64,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=3,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    trainer = RankInProcess(tmp_path, tmp_path / "model", longest=400, activationCheckpointing=True)

    found = held(trainer.loop, tokens=400)

    assert_near(found, AutoConfig.from_pretrained(tmp_path / "model"), Pass(400, torch.float32, recomputes=True))


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("dense", {}),
        ("dense", {"optimizer": "SGD", "dtype": "bfloat16", "activationCheckpointing": True}),
        ("dense", {"has_reference": True, "klCoefficient": 0.1}),
        ("dense", {"has_reference": True, "klCoefficient": 0.1, "lora": {"rank": 8}}),
        ("dense", {"lora": {"rank": 8}, "activationCheckpointing": True}),
        ("experts", {}),
        ("experts", {"dtype": "bfloat16", "activationCheckpointing": True}),
    ],
)
def test_trainer_and_its_step_take_what_the_budget_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, options: dict[str, object]
) -> None:
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # what other threads allocate is not counted
    if model == "dense":
        write_tiny_model(tmp_path / model, hidden=256, layers=8, vocabulary=2048)
    else:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(transformers.Qwen3MoeConfig(**EXPERTS)).save_pretrained(tmp_path / model)
    found, budget = peak_and_budget(tmp_path, tmp_path / model, options, tokens=300)
    assert budget.host - budget.exports == pytest.approx(found, rel=NEAR)


@pytest.mark.release
def test_step_of_samples_of_32768_tokens_trains_within_its_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores of all tokens with each other would be 4 GiB for each head."""
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # what other threads allocate is not counted
    tokens = 32_768
    model = write_tiny_model(tmp_path / "model", positions=tokens)

    found, budget = peak_and_budget(tmp_path, model, {}, tokens=tokens)

    assert budget.host - budget.exports == pytest.approx(found, rel=NEAR)
    assert found < 2**28


def test_model_that_computes_by_values_is_not_rehearsed() -> None:
    config = transformers.Qwen3MoeConfig(**EXPERTS, experts_implementation="eager")
    assert pass_bytes(config, Pass(10, torch.float32)) is None


@pytest.mark.parametrize("kind", ["gptj", "falcon", "gpt_neo", "mpt", "deepseek_v32"])
def test_model_whose_attention_is_its_own_is_rehearsed_if_it_can_be_and_trains(tmp_path: Path, kind: str) -> None:
    """The trainer ended in a traceback while it loaded, and so did the forecast.

    Falcon has an SDPA of its own, in which packed samples have no part, and DeepSeek-V3.2 needs a mask.
    """
    small = {"vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "eos_token_id": 1}
    own: dict[str, dict[str, Any]] = {
        "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2},
        "gptj": {"rotary_dim": 4},
        "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "num_heads": 4},
        "deepseek_v32": SPARSE,
    }
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **small | own.get(kind, {}))).save_pretrained(
        tmp_path / "model"
    )
    found = pass_bytes(AutoConfig.from_pretrained(tmp_path / "model"), Pass(10, torch.float32))
    assert (found is None) == (kind in ("falcon", "deepseek_v32"))
    load_model(tmp_path / "model")  # and its trainer starts


@pytest.mark.parametrize(("shared_by", "recomputes"), [(1, False), pytest.param(4, True, marks=pytest.mark.release)])
@pytest.mark.parametrize("kinds", ["e" * 9, "dd" + "e" * 6, "de" * 4 + "d"])
def test_few_layers_tell_of_many(kinds: str, shared_by: int, recomputes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    dense = [layer for layer, kind in enumerate(kinds) if kind == "d"]
    config = transformers.Qwen3MoeConfig(**{**EXPERTS, "num_hidden_layers": len(kinds)}, mlp_only_layers=dense)
    of = Pass(300, torch.bfloat16, shared_by=shared_by, recomputes=recomputes)
    estimate = pass_bytes(config, of)

    monkeypatch.setattr(rehearsal, "FEW", 9)  # all of them are rehearsed

    assert pass_bytes(config, of) == estimate


QUICK = ("Qwen3-0.6B",)
USUAL = ("dense-4b", "mixture-30b")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.release) for name in MODELS]
)
def test_table_of_sizes_is_as_made(name: str) -> None:
    text = (CHECKOUT.root / PAGE).read_text()

    assert row(name) in text.partition(HEAD)[2].splitlines(), "python -m bench.sizes"
    lines = text.partition(HEAD)[2].partition("\n\n")[0].splitlines()[2:]
    assert [*MODELS] == [line.split(" | ")[0].strip("| ") for line in lines]


def test_model_of_7_billion_parameters_takes_one_device_with_updates_on_the_host_as_documented() -> None:
    config = AutoConfig.for_model(**MODELS["Qwen2.5-7B"])
    with torch.device("meta"):
        parameters = sum(tensor.numel() for tensor in AutoModelForCausalLM.from_config(config).parameters())
    one_pass = pass_bytes(config, Pass(TOKENS, torch.bfloat16, recomputes=True))
    assert one_pass is not None
    budget = Budget.of(parameters, on_cpu=False, one_pass=one_pass, export_bytes=2 * parameters, updates_on_host=True)
    assert budget.device is not None
    budget.refuse_what_never_fits(device_has=int(FILLED * MEMORY["80 GB"] * 2**30), host_has=None)
    words = f"takes {gib(budget.device)} of one device of 80 GB, and {gib(budget.host)} of host memory"
    assert words in (CHECKOUT.root / PAGE).read_text()


FIRST = CHECKOUT.root / "examples/gpu/first.yaml"


def described(folder: Path, name: str) -> Path:
    """Return a directory with the model's config.json and nothing else."""
    AutoConfig.for_model(**MODELS[name]).save_pretrained(folder / name)
    return folder / name


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(case, marks=() if case.name in USUAL else pytest.mark.release, id=case.name)
        for case in GPU_EXAMPLES
    ],
)
def test_jobs_for_gpu_nodes_fit_into_their_devices_and_volumes_by_the_same_budget(
    example: Case, tmp_path: Path
) -> None:
    spec = ColocatedRLJobSpec.model_validate(yaml.safe_load(example.text)["spec"])
    hub = spec.model.hugging_face
    model = described(tmp_path, hub.name.rpartition("/")[2] if hub else spec.model.path)
    memory = ONE_GPU_GIB if example.name == "first" else MEMORY["80 GB"]
    device = FILLED * memory * 2**30
    if not spec.rollout.offload:
        arguments = spec.rollout.engine.args
        device -= float(arguments[arguments.index("--mem-fraction-static") + 1]) * memory * 2**30

    predicted = Forecast(spec, TrainerConfig.of(spec.trainer.config), model, ranks_of(spec), on_cpu=False)
    _, budget = predicted.choose(device_has=int(device), host_has=None)

    budget.refuse_what_never_fits(
        device_has=int(device),
        host_has=size_in_bytes(str(spec.gpus.resources.limits["memory"])),
        exports_have=predicted.exports_have,
        mirrors_have=predicted.mirrors_have,
    )


def forecast_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, list[str], str]:
    """Return exit code, lines and error of the command."""
    code = forecast.main([*map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out.splitlines(), err


def test_a_person_learns_what_a_job_takes_before_there_is_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = described(tmp_path, "Qwen3-0.6B")

    code, lines, err = forecast_of(capsys, FIRST, model, "--device-memory", "22Gi")

    assert (0, "") == (code, err)
    device, host, exports = lines
    assert re.match(
        r"each device, at the peak of a step: \d+\.\d GiB of 22\.0 GiB; a pass takes \d+\.\d GiB of it", device
    )
    assert "gpus.resources.limits.memory, without engine and programs: 8.9 GiB of 24.0 GiB" == host
    assert "of that weightSync.sizeLimit: 2.2 GiB of 4.0 GiB" == exports


@pytest.mark.parametrize(
    ("placement", "change", "bytes_each"),
    [
        ("WithRollout", {}, 4),
        ("WithRollout", {"trainer": {"config": {"lora": {"rank": 8}}}}, 2),
        ("WithRollout", {"gpus": {"count": 2}}, 2),
        ("WithTrainer", {}, 0),
        ("WithRollout", {"rollout": {"placement": "OwnDevices", "replicas": 1}}, 0),
    ],
)
def test_a_reference_beside_engine_and_trainer_holds_the_whole_model_on_each_device(
    tmp_path: Path, placement: str, change: dict[str, Any], bytes_each: int
) -> None:
    """It is in the dtype of the computation where layers of adapters, or divided ones, compute in that."""
    spec = ColocatedRLJobSpec.model_validate(beside(placement, change))
    config, model = TrainerConfig.of(spec.trainer.config), described(tmp_path, "Qwen3-0.6B")

    held = Forecast(spec, config, model, ranks_of(spec), on_cpu=False)._reference_beside

    assert bytes_each * 596_049_920 == held


def beside(placement: str, change: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Return the spec of the first job with engines that stay, and a reference."""
    spec: dict[str, Any] = yaml.safe_load(FIRST.read_text())["spec"]
    rollout = spec["rollout"] | {"offload": []} | change.get("rollout", {})
    return spec | {"reference": {"placement": placement}} | dict(change) | {"rollout": rollout}


def test_a_person_learns_what_a_reference_beside_engine_and_trainer_holds(tmp_path: Path) -> None:
    spec = ColocatedRLJobSpec.model_validate(beside("WithRollout"))
    predicted = Forecast(spec, TrainerConfig(), described(tmp_path, "Qwen3-0.6B"), ranks_of(spec), on_cpu=False)
    budget = Budget(device=10 * 2**30, host=2**30, reference=predicted._reference_beside)

    lines = [*forecast._lines(predicted, budget, recomputes=False, device_has=None, host_has=None)]

    assert "each device, for the reference beside engine and trainer: 2.2 GiB" == lines[1]


@pytest.mark.parametrize(
    ("change", "device_memory", "words"),
    [
        (("", ""), "8Gi", "of each device, which has 8.0 GiB, and a pass takes"),
        (("memory: 24Gi", "memory: 5Gi"), "80Gi", "take 8.9 GiB of host memory, and there are 5.0 GiB"),
        (
            ("sizeLimit: 4Gi", "sizeLimit: 2Gi"),
            "80Gi",
            "take 2.2 GiB, and their volume has 2.0 GiB: set weightSync.siz",
        ),
    ],
)
def test_a_job_that_never_fits_is_refused_with_both_numbers_before_there_is_one(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: tuple[str, str],
    device_memory: str,
    words: str,
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(FIRST.read_text().replace(*change))

    code, _, err = forecast_of(capsys, job, described(tmp_path, "Qwen3-0.6B"), "--device-memory", device_memory)

    assert (1, True) == (code, words in err), err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("learningRate", "learningrate"), "did you mean learningRate"),
        (("steps: 20", "steps: none"), "spec.steps"),
        (("kind: ColocatedRLJob", "kind: ["), "while parsing"),
        (("", ""), "holds no model in Hugging Face format"),
    ],
)
def test_a_job_that_nobody_could_run_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: tuple[str, str], words: str
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(FIRST.read_text().replace(*change))

    code, lines, err = forecast_of(capsys, job, tmp_path)

    assert (2, []) == (code, lines)
    assert words in err
