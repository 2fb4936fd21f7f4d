"""These tests show which settings a trainer accepts, and its one line about those that it rejects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from colocated_rl_api.trainer_wire import TrainerEnvironment
from colocated_rl_trainer.conformance.ranks import job_file
from colocated_rl_trainer.protocol.settings import ConfigError, RankSettings, TrainerConfig
from scenarios.corpus import GPU_EXAMPLES, Case

ENVIRONMENT: dict[str, str] = {
    TrainerEnvironment.SOCKET: "/run/colocate/sock/trainer-3.sock",
    TrainerEnvironment.CONFIG: "/etc/colocate/job/trainer.json",
    TrainerEnvironment.JOB: "/etc/colocate/job/job.json",
    TrainerEnvironment.MODEL: "/model",
    TrainerEnvironment.CHECKPOINTS: "/checkpoints",
    TrainerEnvironment.LINEAGE: "2",
    TrainerEnvironment.RANK: "3",
    TrainerEnvironment.WORLD_SIZE: "4",
    TrainerEnvironment.LOCAL_RANK: "1",
    TrainerEnvironment.MASTER_ADDR: "10.0.0.7",
    TrainerEnvironment.MASTER_PORT: "29502",
    TrainerEnvironment.DEVICE: "cuda:1",
}


@pytest.mark.parametrize("example", GPU_EXAMPLES, ids=lambda case: case.name)
def test_trainer_takes_the_settings_of_the_jobs_for_gpu_nodes(example: Case) -> None:
    spec = yaml.safe_load(example.text)["spec"]
    config = TrainerConfig.model_validate(spec["trainer"]["config"])
    longest = spec["rollout"]["maxPromptTokens"] + spec["rollout"]["maxResponseTokens"]
    assert config.micro_batch_tokens >= longest


def test_place_in_the_job_comes_from_the_environment() -> None:
    settings = RankSettings.from_environment(ENVIRONMENT)

    assert (3, 4, 1, 2) == (settings.rank, settings.world_size, settings.local_rank, settings.lineage)
    assert ("10.0.0.7", 29502, "cuda:1") == (settings.master_address, settings.master_port, settings.device)
    assert not settings.writes_weights


@pytest.mark.parametrize("variable", [*ENVIRONMENT])
def test_missing_variable_is_named(variable: TrainerEnvironment) -> None:
    environment = {name: value for name, value in ENVIRONMENT.items() if name is not variable}

    with pytest.raises(ConfigError, match=f"{variable} is not set"):
        RankSettings.from_environment(environment)


@pytest.mark.parametrize("value", ["-1", "one", "1.0", "1_0", "\N{SUPERSCRIPT TWO}"])
def test_variable_that_is_no_number_is_named_with_its_value(value: str) -> None:
    with pytest.raises(ConfigError, match=f"RANK={value} must be a whole number"):
        RankSettings.from_environment(ENVIRONMENT | {TrainerEnvironment.RANK: value})


def test_rank_beyond_its_group_is_refused() -> None:
    with pytest.raises(ConfigError, match="RANK=4 must be below WORLD_SIZE=4"):
        RankSettings.from_environment(ENVIRONMENT | {TrainerEnvironment.RANK: "4"})


def test_config_is_read_by_its_written_names(tmp_path: Path) -> None:
    config = TrainerConfig.read(_file(tmp_path, {"learningRate": 0, "betas": [0.9, 0.99], "dtype": "bfloat16"}))

    assert (0, (0.9, 0.99), "bfloat16") == (config.learning_rate, config.betas, config.dtype)


@pytest.mark.parametrize(
    ("value", "device", "dtype"),
    [
        (None, "cpu", "float32"),
        (None, "cuda:0", "bfloat16"),
        ("float32", "cuda:0", "float32"),
        ("bfloat16", "cpu", "bfloat16"),
    ],
)
def test_models_are_computed_as_their_engines_compute_them(value: Any, device: str, dtype: str) -> None:
    """The trainer's exports made an engine compute in float16 where this trainer
    computes in float32, its default on a GPU.
    """
    assert dtype == TrainerConfig(dtype=value).computes_in(device)


def test_empty_config_has_defaults(tmp_path: Path) -> None:
    assert TrainerConfig() == TrainerConfig.read(_file(tmp_path, {}))


def test_unknown_key_is_refused_with_the_nearest_and_all_known_ones(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"unknown key learning_rate .* did you mean learningRate\? \(known: learning"
    ):
        TrainerConfig.read(_file(tmp_path, {"learning_rate": 0.1}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("learningRate", -1), ("warmupSteps", -1), ("weightDecay", -0.1), ("betas", [0.9]), ("betas", [0.9, 1.0]),
        ("gradientClip", 0), ("minibatches", 0), ("dataPasses", 0), ("clipLow", 1.5), ("clipHigh", 0),
        ("importanceCap", 1), ("bypass", "perhaps"), ("microBatchTokens", 0), ("seed", -1), ("threads", 0),
        ("dtype", "float16"), ("klCoefficient", -1), ("klEstimator", "K4"),
        ("maxTokenAge", -1), ("schedule", "Step"), ("decaySteps", 0), ("finalLearningRate", -1),
        ("activationCheckpointing", "perhaps"), ("trainingState", "Halved"),
        ("nonFiniteGradient", "Ignore"), ("maxSkippedUpdates", 0),
        ("loss", "TRPO"), ("dualClip", 1), ("entropyCoefficient", -1), ("importanceLevel", "Batch"),
        ("importanceMask", "Batch"), ("importanceMaskLow", 0), ("importanceMaskHigh", 0.9), ("advantage", "Rank"),
        ("trackers", ["Excel"]), ("wandbProject", ""),
        ("lora.rank", 0), ("lora.alpha", 0), ("lora.dropout", 1), ("lora.targetModules", []),
        ("lora.targetModules.0", ""), ("lora.bias", "all"), ("lora", True),
    ],
)  # fmt: skip
def test_value_out_of_bounds_is_refused_by_name(tmp_path: Path, key: str, value: object) -> None:
    *outer, last = key.removesuffix(".0").split(".")
    written: object = {last: [value] if key.endswith(".0") else value}
    for name in outer:
        written = {name: written}
    with pytest.raises(ConfigError, match=rf"spec\.trainer\.config: {key}\b.*, is "):
        TrainerConfig.read(_file(tmp_path, written))


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("critic", "there is no critic"),
        ("valueCoefficient", "there is no critic"),
        ("tensorParallelSize", r"ranks share a model's state \(trainingState\)"),
        ("megatron", "no helper for Megatron"),
        ("quantization", "neither training nor rollout is quantized"),
        ("cudaIpc", "weights reach the engines as files in memory"),
    ],
)
def test_what_is_not_supported_yet_is_said_so(tmp_path: Path, key: str, message: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^{key} in spec\.trainer\.config: .*{message}.* Not supported yet: leave it out"
    ):
        TrainerConfig.read(_file(tmp_path, {key: 1}))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"schedule": "Cosine"}, "decaySteps sets when a Linear or Cosine schedule ends"),
        ({"finalLearningRate": 0.1}, "finalLearningRate is where a Linear or Cosine schedule ends"),
        ({"decaySteps": 9}, "decaySteps sets when a Linear or Cosine schedule ends"),
        ({"schedule": "Linear", "decaySteps": 9, "warmupSteps": 9}, "decaySteps must be after warmupSteps, 9"),
        ({"optimizer": "SGD", "betas": [0.9, 0.95]}, "betas are AdamW.s"),
        ({"optimizer": "SGD", "updatesOnHost": True}, "updatesOnHost is for AdamW.s moments"),
        ({"maxSkippedUpdates": 3}, "maxSkippedUpdates is of nonFiniteGradient Skip"),
        ({"loss": "GSPO"}, "loss GSPO has one ratio for a sample, .* set average to Sequences"),
        ({"loss": "CISPO", "dualClip": 4.0}, "dualClip bounds the ratio of PPO and GSPO"),
        ({"clipHigh": 2.5}, r"dualClip is 3.0, and must be above 1 \+ clipHigh, or null"),
        ({"importanceMask": "Token", "importanceMaskLow": 0.5}, "importanceMask needs importanceMaskLow and"),
        ({"importanceMaskLow": 0.5, "importanceMaskHigh": 5.0}, "importanceMask needs importanceMaskLow and"),
        ({"bypass": True, "importanceLevel": "Sequence"}, "bypass clips against the behaviour policy"),
        ({"bypass": True, "importanceCap": 5}, "bypass clips against the behaviour policy"),
        ({"klBiasCorrection": True}, "klBiasCorrection corrects the KL in the loss: set klCoefficient"),
        (
            {"klBiasCorrection": True, "klCoefficient": 0.1, "importanceLevel": "Sequence"},
            "klBiasCorrection weights each token's own KL",
        ),
        ({"wandbProject": "sums", "trackers": ["TensorBoard"]}, "wandbProject is of Weights & Biases: add WandB"),
    ],
)
def test_values_that_contradict_each_other_are_refused(tmp_path: Path, config: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"spec\.trainer\.config: {message}"):
        TrainerConfig.read(_file(tmp_path, config))


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({}, [0.2, 0.4, 0.4, 0.4, 0.4, 0.4, 0.4]),
        ({"schedule": "Linear", "decaySteps": 6}, [0.2, 0.4, 0.3, 0.2, 0.1, 0.0, 0.0]),
        ({"schedule": "Linear", "decaySteps": 6, "finalLearningRate": 0.2}, [0.2, 0.4, 0.35, 0.3, 0.25, 0.2, 0.2]),
        ({"schedule": "Cosine", "decaySteps": 4}, [0.2, 0.4, 0.2, 0.0, 0.0, 0.0, 0.0]),
    ],
)
def test_learning_rate_follows_its_schedule(tmp_path: Path, schedule: dict[str, object], expected: list[float]) -> None:
    config = TrainerConfig.read(_file(tmp_path, {"learningRate": 0.4, "warmupSteps": 2} | schedule))

    assert expected == pytest.approx([config.learning_rate_at(step) for step in range(1, 8)])


@pytest.mark.parametrize(("written", "message"), [("{", "not readable JSON"), ("[]", "must be an object")])
def test_file_that_is_no_object_is_refused(tmp_path: Path, written: str, message: str) -> None:
    file = tmp_path / "trainer.json"
    file.write_text(written)

    with pytest.raises(ConfigError, match=message):
        TrainerConfig.read(file)


def _file(folder: Path, config: object) -> Path:
    file = folder / "trainer.json"
    file.write_text(json.dumps(config))
    return file


@pytest.mark.parametrize(
    ("mode", "placement", "writers", "of_pods"),
    [
        ("Full", "WithTrainer", [0, 2], [0, 1, 2, 3]),
        ("Full", "OwnDevices", [0], [0, 1]),
        ("Full", "Both", [0], [0, 1]),
        ("TrainOnly", "OwnDevices", [0, 2], [0, 1, 2, 3]),
    ],
)
def test_each_pod_writes_weights_and_that_of_rank_0_alone_where_pods_share_a_volume(
    tmp_path: Path, mode: str, placement: str, writers: list[int], of_pods: list[int]
) -> None:
    """One rank of each such pod, of `writers`, completes the exports; `of_pods` has all ranks of these pods."""
    job: Any = job_file()
    job["spec"]["mode"] = mode
    job["spec"]["rollout"]["placement"] = placement
    if placement != "WithTrainer":
        job["spec"]["rollout"]["replicas"] = 1
    if mode == "TrainOnly":
        job["spec"]["recorded"] = {"claimName": "recording"}
    place = {TrainerEnvironment.JOB: str(_file(tmp_path, job))}

    ranks = [
        RankSettings.from_environment(
            ENVIRONMENT | place | {TrainerEnvironment.RANK: str(rank), TrainerEnvironment.LOCAL_RANK: str(rank % 2)}
        )
        for rank in range(4)
    ]

    assert writers == [settings.rank for settings in ranks if settings.writes_weights]
    assert of_pods == [settings.rank for settings in ranks if settings.pod_writes_weights]
    assert [0, 0, 2, 2] == [settings.first_of_pod for settings in ranks]
