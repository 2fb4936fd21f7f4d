"""The default trainer against trl, on the same batch and weights: advantages, ratios, KL, loss and gradient.

Both passes over the batch are compared: in the second the policy is no longer what the step began with, so the ratio is
clipped and there is a divergence. trl begins it with the weights that our first update led to.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from contract.peer import run_peer
from contract.trainer_in_process import RankInProcess
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from colocated_rl_api.job import OverlongPenalty
from colocated_rl_rollout.rules.overlong import overlong_penalty
from colocated_rl_trainer.conformance.shards import Example, write_shards
from colocated_rl_trainer.grpo.batch import Shard, Use
from colocated_rl_trainer.grpo.loss import importance_ratio
from fakes.tiny_model import VOCABULARY, write_tiny_model

pytestmark = pytest.mark.slow

GROUPS, GROUP_SIZE = 6, 4
LIMIT = 1024  # maxResponseTokens of the job, its default
CAP = 1.5

NO_DUAL: dict[str, object] = {"dualClip": None}
GRPO = NO_DUAL | {"advantage": "Spread", "average": "Sequences", "clipLow": 0.2, "clipHigh": 0.2}
DAPO = NO_DUAL | {"advantage": "Spread", "average": "Tokens", "clipLow": 0.2, "clipHigh": 0.28}
DR_GRPO = NO_DUAL | {"advantage": "Mean", "average": "Limit", "clipLow": 0.2, "clipHigh": 0.2}
TRL_GRPO = {"loss_type": "grpo", "scale_rewards": "group", "epsilon": 0.2, "epsilon_high": 0.2}
TRL_DAPO = {"loss_type": "dapo", "scale_rewards": "group", "epsilon": 0.2, "epsilon_high": 0.28}
TRL_DR_GRPO = {"loss_type": "dr_grpo", "scale_rewards": "none", "epsilon": 0.2, "max_completion_length": LIMIT}
KL = {"klCoefficient": 0.3}

VARIANTS: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "grpo": (GRPO, {**TRL_GRPO, "beta": 0.0}),
    "grpo-kl": (GRPO | KL, {**TRL_GRPO, "beta": 0.3}),
    "dapo": (DAPO, {**TRL_DAPO, "beta": 0.0}),
    "dapo-kl": (DAPO | KL, {**TRL_DAPO, "beta": 0.3}),
    "dr-grpo": (DR_GRPO, {**TRL_DR_GRPO, "beta": 0.0}),
    "dr-grpo-kl": (DR_GRPO | KL, {**TRL_DR_GRPO, "beta": 0.3}),
    "dual-clip": (DAPO | {"dualClip": 1.3}, {**TRL_DAPO, "beta": 0.0, "delta": 1.3}),
    "gspo": (
        GRPO | {"loss": "GSPO", "clipLow": 0.03, "clipHigh": 0.04},
        {**TRL_GRPO, "beta": 0.0, "importance_sampling_level": "sequence", "epsilon": 0.03, "epsilon_high": 0.04},
    ),
    "cispo": (
        DAPO | {"loss": "CISPO", "clipLow": 1.0, "clipHigh": 0.1},  # trl has no lower bound, and names the ratio
        {**TRL_DAPO, "beta": 0.0, "loss_type": "cispo", "epsilon_high": 1.1},
    ),
    "entropy": (DAPO | {"entropyCoefficient": 0.2}, {**TRL_DAPO, "beta": 0.0, "entropy_coef": 0.2}),
    "icepop": (
        DAPO | {"importanceMask": "Token", "importanceMaskLow": 0.7, "importanceMaskHigh": 3.0, "importanceCap": 3.0},
        {
            **TRL_DAPO, "beta": 0.0, "vllm_importance_sampling_mode": "token_mask",
            "vllm_importance_sampling_clip_min": 0.7, "vllm_importance_sampling_clip_max": 3.0,
        },
    ),
    "mis": (
        DAPO
        | {
            "importanceLevel": "Sequence", "importanceMask": "Sequence", "importanceMaskLow": 0.2,
            "importanceMaskHigh": 20.0, "importanceCap": 20.0,
        },
        {
            **TRL_DAPO, "beta": 0.0, "vllm_importance_sampling_mode": "sequence_mask",
            "vllm_importance_sampling_clip_min": 0.2, "vllm_importance_sampling_clip_max": 20.0,
        },
    ),
    "sequence-truncated": (
        DAPO | {"importanceLevel": "Sequence"},
        {**TRL_DAPO, "beta": 0.0, "vllm_importance_sampling_mode": "sequence_truncate"},
    ),
    "bypass": (DAPO | {"bypass": True}, {**TRL_DAPO, "beta": 0.0}),
    "bypass-kl-corrected": (
        DAPO | KL | {"bypass": True, "klBiasCorrection": True},
        {**TRL_DAPO, "beta": 0.3, "use_bias_correction_kl": True},
    ),
}  # fmt: skip
TRUNCATED = [name for name, (config, _) in VARIANTS.items() if not ({"importanceMask", "bypass"} & config.keys())]
MASKED = ["icepop", "mis"]
ALL_ARE_COMPUTED = ("klCoefficient", "entropyCoefficient")  # otherwise the group of equal rewards is not


def make_samples() -> list[Example]:
    """Groups of different rewards, one of equal ones, and responses with tokens that a tool wrote."""
    chance = random.Random(5)
    samples = []
    for group in range(GROUPS):
        prompt = [chance.randrange(2, VOCABULARY) for _ in range(chance.randint(2, 5))]
        for number in range(GROUP_SIZE):
            response = [chance.randrange(2, VOCABULARY) for _ in range(chance.randint(3, 12))]
            written = [not (number == 1 and 0 < place < 3) for place in range(len(response))]
            logp = [-chance.uniform(2.5, 5.0) if by_policy else 0.0 for by_policy in written]
            reward = 1.0 if group == 0 else chance.random()
            samples.append(Example(prompt, response, logp, reward, group, 0, written))
    return samples


class Ours:
    """One step of two passes, as the trainer does it."""

    def __init__(self, folder: Path, model: Path, config: Mapping[str, object]) -> None:
        folder.mkdir()
        trainer = RankInProcess(
            folder, model, has_reference="klCoefficient" in config,
            **{"learningRate": 0.05, "dataPasses": 2, "gradientClip": 1e9, "microBatchTokens": 40}
            | ({} if "bypass" in config else {"importanceCap": CAP})
            | dict(config),
        )  # fmt: skip
        self.gradients: list[dict[str, Tensor]] = []
        self.weights: list[dict[str, Tensor]] = []
        trainer.at_update = lambda: self._look(trainer)
        self.metrics = trainer.train(make_samples())

    def _look(self, trainer: RankInProcess) -> None:
        self.gradients.append(trainer.gradients)
        self.weights.append(trainer.weights)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trl")


@pytest.fixture(scope="module")
def both(folder: Path) -> Mapping[str, tuple[Ours, Mapping[str, Tensor]]]:
    """Return our results and trl's, by variant."""
    model = write_tiny_model(folder / "model")
    ours = {name: Ours(folder / f"ours-{name}", model, config) for name, (config, _) in VARIANTS.items()}
    for name, step in ours.items():
        save_file(step.weights[1], folder / f"{name}.safetensors")
    case = {
        "model": str(model),
        "groupSize": GROUP_SIZE,
        "temperature": 1.0,
        "importanceCap": CAP,
        "samples": [
            {
                "prompt": sample.prompt,
                "response": sample.response,
                "logp": sample.logp,
                "written": [int(by_policy) for by_policy in sample.written or ()],
                "reward": sample.reward,
            }
            for sample in make_samples()
        ],
        "variants": [
            {"name": name, "trl": options, "bypass": "bypass" in config} for name, (config, options) in VARIANTS.items()
        ],
    }
    (folder / "case.json").write_text(json.dumps(case))
    run_peer("trl_step.py", folder)
    return {name: (step, load_file(folder / f"{name}.trl.safetensors")) for name, step in ours.items()}


@pytest.fixture(params=VARIANTS)
def name(request: pytest.FixtureRequest) -> str:
    variant: str = request.param
    return variant


def test_advantages_are_those_of_trl(
    both: Mapping[str, tuple[Ours, Mapping[str, Tensor]]], name: str, tmp_path: Path
) -> None:
    (shard,) = write_shards(tmp_path, make_samples(), step=1, split=1)
    use = Use(advantage="Spread" if VARIANTS[name][0]["advantage"] == "Spread" else "Mean")

    advantages = Shard.read(shard, step=1, shard=0, shards=1, use=use).advantage

    torch.testing.assert_close(advantages, both[name][1]["advantages"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("truncated", TRUNCATED)
def test_importance_ratios_are_those_of_trl(
    both: Mapping[str, tuple[Ours, Mapping[str, Tensor]]], truncated: str
) -> None:
    ours, trl = both[truncated]

    cut_off = trl["importance"] >= CAP
    assert 0 < int(cut_off.sum()) < len(cut_off)
    if VARIANTS[truncated][0].keys() & set(ALL_ARE_COMPUTED):
        assert float(trl["importance"].mean()) == pytest.approx(ours.metrics["importance_mean"], rel=1e-5)
        assert float(cut_off.float().mean()) == pytest.approx(ours.metrics["importance_truncated"], rel=1e-5)
    torch.testing.assert_close(
        trl["importance"], importance_ratio(trl["importance"].log(), torch.zeros(len(cut_off)), cap=CAP)
    )


@pytest.mark.parametrize("masked", MASKED)
def test_importance_mask_leaves_out_what_trls_does(
    both: Mapping[str, tuple[Ours, Mapping[str, Tensor]]], masked: str
) -> None:
    """The group of equal rewards is not computed here; the gradients are compared nevertheless."""
    ours, trl = both[masked]
    real = [sample for sample in make_samples() for written in sample.written or () if written]
    left_out = torch.tensor([sample.group > 0 for sample in real]) & (trl["importance"] == 0)

    computed = sum(sample.group > 0 for sample in real)
    assert 0.1 < float(left_out.sum()) / computed < 0.9
    assert float(left_out.sum()) / computed == pytest.approx(ours.metrics["importance_masked"], rel=1e-5)


def test_dual_clip_takes_further_gradients_away(both: Mapping[str, tuple[Ours, Mapping[str, Tensor]]]) -> None:
    """Otherwise its comparison would show nothing: both second passes begin with the same weights."""
    assert both["dapo"][0].metrics["clip_fraction"] < both["dual-clip"][0].metrics["clip_fraction"]


def test_loss_is_that_of_trl(both: Mapping[str, tuple[Ours, Mapping[str, Tensor]]], name: str) -> None:
    ours, trl = both[name]

    assert float(trl["first.loss"] + trl["second.loss"]) / 2 == pytest.approx(ours.metrics["loss"], rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("number", [0, 1])
def test_gradient_is_that_of_trl(both: Mapping[str, tuple[Ours, Mapping[str, Tensor]]], name: str, number: int) -> None:
    ours, trl = both[name]
    prefix = ("first", "second")[number] + ".gradient."

    theirs = {entry.removeprefix(prefix): tensor for entry, tensor in trl.items() if entry.startswith(prefix)}
    assert theirs.keys() == ours.gradients[number].keys()
    apart = sum(float((tensor - ours.gradients[number][entry]).square().sum()) for entry, tensor in theirs.items())
    whole = sum(float(tensor.square().sum()) for tensor in theirs.values())
    assert apart**0.5 < 1e-5 * whole**0.5


@pytest.mark.parametrize("kl", ["grpo-kl", "dapo-kl", "dr-grpo-kl"])
def test_divergence_is_that_of_trl(both: Mapping[str, tuple[Ours, Mapping[str, Tensor]]], kl: str) -> None:
    ours, trl = both[kl]

    assert 0 == pytest.approx(float(trl["first.kl"]), abs=1e-6)
    assert 1e-3 < float(trl["second.kl"])
    assert float(trl["first.kl"] + trl["second.kl"]) / 2 == pytest.approx(ours.metrics["kl"], rel=1e-5)


def test_second_pass_is_clipped(both: Mapping[str, tuple[Ours, Mapping[str, Tensor]]], name: str) -> None:
    """Otherwise the comparison would not cover clipping."""
    assert 0.02 < both[name][0].metrics["clip_fraction"]


@pytest.mark.usefixtures("both")
def test_overlong_penalty_is_that_of_trl(folder: Path) -> None:
    punishment = load_file(folder / "overlong.safetensors")["punishment"]
    rule = OverlongPenalty(buffer_tokens=10)

    ours = [-overlong_penalty(length, limit=30, rule=rule) for length in range(41)]
    torch.testing.assert_close(torch.tensor(ours), punishment)


# ---------------------------------------------------------------------------------------------------------------- RLOO
def sampled_by(model: Path) -> list[Example]:
    """The samples with the log-probabilities of the model itself, all of whose tokens it wrote."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    samples = []
    for sample in make_samples():
        ids = torch.tensor([[*sample.prompt, *sample.response]])
        with torch.no_grad():
            logp = torch.log_softmax(policy(ids).logits[0, :-1], dim=-1).gather(1, ids[0, 1:, None])[:, 0]
        written = logp[len(sample.prompt) - 1 :].tolist()
        samples.append(Example(sample.prompt, sample.response, written, sample.reward, sample.group, 0))
    return samples


def test_rloo_of_samples_of_the_policy_itself_is_that_of_trl(tmp_path: Path) -> None:
    """trl's ratio is that of a whole sample, ours of a token: both are 1 here. trl sums over a sample, and ours divides
    that by the limit.
    """
    model = write_tiny_model(tmp_path / "model")
    samples = sampled_by(model)
    (tmp_path / "ours").mkdir()
    ours = RankInProcess(
        tmp_path / "ours", model, advantage="LeaveOneOut", average="Limit", gradientClip=1e9, microBatchTokens=40
    )
    gradients: list[dict[str, Tensor]] = []
    ours.at_update = lambda: gradients.append(ours.gradients)
    ours.train(samples)
    rows = [{"prompt": each.prompt, "response": each.response, "reward": each.reward} for each in samples]
    case = {"model": str(model), "groupSize": GROUP_SIZE, "samples": rows}
    (tmp_path / "case.json").write_text(json.dumps(case))
    run_peer("trl_rloo.py", tmp_path)
    trl = load_file(tmp_path / "rloo.safetensors")

    (shard,) = write_shards(tmp_path, samples, step=1, split=1)
    advantages = Shard.read(shard, step=1, shard=0, shards=1, use=Use(advantage="LeaveOneOut")).advantage
    torch.testing.assert_close(advantages, trl["advantages"], rtol=1e-5, atol=1e-5)
    theirs = {name.removeprefix("gradient."): each for name, each in trl.items() if name.startswith("gradient.")}
    assert theirs.keys() == gradients[0].keys()
    apart = sum(float((tensor - LIMIT * gradients[0][name]).square().sum()) for name, tensor in theirs.items())
    whole = sum(float(tensor.square().sum()) for tensor in theirs.values())
    assert apart**0.5 < 1e-5 * whole**0.5
