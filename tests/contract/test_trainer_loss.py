"""The loss, against values worked by hand, finite differences and the definition."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch

from colocated_rl_trainer.grpo.loss import (
    LengthMismatch,
    _Entropy,
    group_advantage,
    importance_mask,
    importance_ratio,
    kl_penalty,
    kl_ratio,
    policy_loss,
    token_logp,
)
from colocated_rl_trainer.protocol.settings import KL, MaskLevel

LOW, HIGH, CAP = 0.2, 0.28, 2.0
Floats = npt.NDArray[np.float64]


def logs(*ratios: float) -> torch.Tensor:
    return torch.tensor(ratios, dtype=torch.float64).log()


@pytest.mark.parametrize(
    ("ratio", "advantage", "importance", "loss", "slope", "clipped"),
    [
        # inside: loss -ratio * advantage; its slope in the log-probability is the same
        (1.0, 2.0, 1.0, -2.0, -2.0, 0),
        (1.2, 0.5, 1.0, -0.6, -0.6, 0),
        (0.9, -1.0, 1.0, 0.9, 0.9, 0),
        # good tokens made much likelier already: no more pull; bad ones made much less likely: no more push
        (1.5, 2.0, 1.0, -2.56, 0.0, 1),
        (0.5, -2.0, 1.0, 1.6, 0.0, 1),
        # outside on the side where the update would bring it back: not clipped
        (1.5, -2.0, 1.0, 3.0, 3.0, 0),
        (0.5, 2.0, 1.0, -1.0, -1.0, 0),
        # nothing to learn, nothing to clip
        (1.5, 0.0, 1.0, 0.0, 0.0, 0),
        # the importance ratio scales all of it
        (1.2, 0.5, 0.5, -0.3, -0.3, 0),
        (1.5, 2.0, 0.5, -1.28, 0.0, 1),
    ],
)
def test_loss_and_slope_of_one_token(
    ratio: float, advantage: float, importance: float, loss: float, slope: float, clipped: int
) -> None:
    policy_logp = logs(0.3 * ratio).requires_grad_()

    result = policy_loss(
        policy_logp,
        logs(0.3),
        torch.tensor([advantage], dtype=torch.float64),
        torch.tensor([importance], dtype=torch.float64),
        clip_low=LOW,
        clip_high=HIGH,
    )
    result.total.backward()

    assert policy_logp.grad is not None
    assert loss == pytest.approx(result.total.item())
    assert slope == pytest.approx(policy_logp.grad.item())
    assert clipped == result.clipped_tokens


@pytest.mark.parametrize("log_ratio", [4.0, 19.9, 20.1, 200.0])
def test_dual_clip_bounds_the_loss_of_a_bad_token_that_has_become_likely(log_ratio: float) -> None:
    """One such token at ratio e^4 had gradient 54.6, and one at e^200 made the whole gradient infinite."""
    slopes = []
    for dual_clip, advantage in ((3.0, -2.0), (None, -2.0), (3.0, 2.0)):
        policy = torch.tensor([log_ratio - 300], dtype=torch.float64, requires_grad=True)
        result = policy_loss(
            policy, torch.tensor([-300.0], dtype=torch.float64), torch.tensor([advantage]), torch.ones(1),
            clip_low=LOW, clip_high=HIGH, dual_clip=dual_clip,
        )  # fmt: skip
        result.total.backward()
        assert policy.grad is not None
        slopes.append(policy.grad.item())
        if dual_clip and advantage < 0:
            assert (6.0, 1) == (result.total.item(), int(result.clipped_tokens))
        if advantage > 0:
            assert [pytest.approx(-2.56), 1] == [result.total.item(), int(result.clipped_tokens)]

    assert [0.0, pytest.approx(2 * math.exp(log_ratio)) if log_ratio < 20 else 0.0, 0.0] == slopes


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [(1.1, 0.5, -0.55, 0), (1.1, -0.5, 0.55, 0), (2.9, -0.5, 1.45, 0), (3.1, -0.5, 1.5, 1), (5.0, 0.0, 0.0, 0)],
)
def test_dual_clip_leaves_all_other_tokens_as_they_are(
    ratio: float, advantage: float, loss: float, clipped: int
) -> None:
    result = policy_loss(
        logs(0.1 * ratio), logs(0.1), torch.tensor([advantage]), torch.ones(1),
        clip_low=LOW, clip_high=HIGH, dual_clip=3.0,
    )  # fmt: skip
    assert [pytest.approx(loss), clipped] == [result.total.item(), int(result.clipped_tokens)]


def test_gspo_has_one_ratio_for_a_sample_the_geometric_mean() -> None:
    sample = torch.tensor([4, 9, 4])
    result = policy_loss(
        logs(0.33, 0.5, 0.36), logs(0.3, 0.5, 0.3), torch.tensor([1.0, 0.0, 1.0]), torch.ones(3), sample=sample,
        clip_low=LOW, clip_high=HIGH, loss="GSPO",
    )  # fmt: skip
    assert [pytest.approx(-2 * math.sqrt(1.1 * 1.2)), 0] == [result.total.item(), int(result.clipped_tokens)]


@pytest.mark.parametrize(("ratio", "weight", "clipped"), [(1.0, 1.0, 0), (1.2, 1.2, 0), (1.5, 1.28, 1), (0.5, 0.8, 1)])
def test_cispo_weighs_a_token_by_its_clipped_ratio_and_takes_no_gradient_away(
    ratio: float, weight: float, clipped: int
) -> None:
    policy = logs(0.3 * ratio).requires_grad_()
    result = policy_loss(
        policy, logs(0.3), torch.tensor([2.0]), torch.tensor([0.5]), clip_low=LOW, clip_high=HIGH, loss="CISPO"
    )
    result.total.backward()
    assert policy.grad is not None
    assert [pytest.approx(-weight * math.log(0.3 * ratio)), clipped] == [
        result.total.item(),
        int(result.clipped_tokens),
    ]
    assert pytest.approx(-weight) == policy.grad.item()


@pytest.mark.parametrize("level", ["Token", "Sequence", "SequenceMean"])
def test_importance_mask_is_that_of_plain_numpy(level: MaskLevel) -> None:
    chance = np.random.default_rng(4)
    proximal, behaviour = -chance.uniform(0.1, 2.0, 40), -chance.uniform(0.1, 2.0, 40)
    sample = chance.permutation(np.repeat([7, 3, 11, 5], 10))
    expected = []
    for token in range(40):
        of = sample == sample[token] if level != "Token" else np.arange(40) == token
        apart = (proximal - behaviour)[of]
        ratio = np.exp(apart.mean() if level == "SequenceMean" else apart.sum())
        expected.append(bool(0.8 <= ratio <= 1.25))

    mask = importance_mask(
        torch.tensor(proximal), torch.tensor(behaviour), torch.tensor(sample), level=level, low=0.8, high=1.25
    )

    assert {True, False} == set(expected)
    assert expected == mask.tolist()


def test_bounds_of_the_importance_mask_are_within() -> None:
    for low, high, expected in ((1.0, 2.0, True), (0.5, 1.0, True), (1.1, 2.0, False), (0.5, 0.9, False)):
        assert [expected] == importance_mask(logs(0.3), logs(0.3), level="Token", low=low, high=high).tolist()


def test_ratio_of_a_whole_sample_is_truncated_as_one() -> None:
    sample = torch.tensor([4, 9, 4, 9])

    ratio = importance_ratio(logs(0.5, 0.5, 0.6, 0.5), logs(0.5, 0.1, 0.5, 0.5), sample, cap=2.0, level="Sequence")

    torch.testing.assert_close(ratio, torch.tensor([1.2, 2.0, 1.2, 2.0], dtype=torch.float64))


def test_penalty_with_its_ratio_has_the_value_and_gradient_of_the_divergence_on_stale_tokens() -> None:
    """The divergence is taken over a whole vocabulary, and the behaviour policy is not the policy any more."""
    generator = torch.Generator().manual_seed(1)
    policy, proximal, behaviour, reference = (
        torch.randn(9, generator=generator, dtype=torch.float64).log_softmax(0) for _ in range(4)
    )
    logits = policy.clone().requires_grad_()
    logp = logits.log_softmax(0)
    divergence = (logp.exp() * (logp - reference)).sum()
    (slope,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    chances = behaviour.exp()
    ratio = kl_ratio(logp, proximal, importance_ratio(proximal, behaviour, cap=1e6))

    corrected = kl_penalty(logp, reference, chances * ratio, estimator="K3")
    uncorrected = kl_penalty(logp, reference, chances, estimator="K3")
    (corrected_slope,) = torch.autograd.grad(corrected, logits, retain_graph=True)

    assert divergence.item() == pytest.approx(corrected.item(), rel=1e-9)
    torch.testing.assert_close(corrected_slope, slope)
    assert abs(divergence.item() - uncorrected.item()) > 0.1 * divergence.item()


def test_entropy_has_the_gradient_of_its_definition() -> None:
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(2)).requires_grad_()
    plain = (logits.double() / 0.7).softmax(-1)
    weight = torch.arange(1.0, 6.0)
    (expected,) = torch.autograd.grad((-(plain * plain.log()).sum(-1) * weight).sum(), logits)

    _, entropy = token_logp(logits, torch.zeros(5), temperature=0.7)
    (slope,) = torch.autograd.grad((entropy * weight).sum(), logits)

    torch.testing.assert_close(slope, expected)


def test_entropy_has_its_own_gradient_whatever_the_numbers_were_computed_by() -> None:
    """`log_softmax` takes out what is the same for all of a row: behind it a wrong one may look right."""
    logp = torch.randn(3, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(_Entropy.apply, (logp,))


def test_loss_is_a_sum_over_tokens() -> None:
    policy, proximal = logs(0.5, 0.2, 0.9), logs(0.4, 0.4, 0.9)
    advantage, importance = torch.tensor([1.0, -1.0, 0.5]), torch.tensor([1.0, 2.0, 0.1])

    whole = policy_loss(policy, proximal, advantage, importance, clip_low=LOW, clip_high=HIGH).total
    parts = [
        policy_loss(
            policy[i : i + 1],
            proximal[i : i + 1],
            advantage[i : i + 1],
            importance[i : i + 1],
            clip_low=LOW,
            clip_high=HIGH,
        ).total
        for i in range(3)
    ]

    torch.testing.assert_close(whole, torch.stack(parts).sum())


def test_gradient_is_that_of_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    shift = torch.rand(64, generator=generator, dtype=torch.float64) - 0.5
    away_from_kinks = shift[((shift.exp() - 0.8).abs() > 0.01) & ((shift.exp() - 1.28).abs() > 0.01)]
    proximal = -torch.rand(len(away_from_kinks), generator=generator, dtype=torch.float64)
    advantage = torch.randn(len(away_from_kinks), generator=generator, dtype=torch.float64)
    importance = torch.rand(len(away_from_kinks), generator=generator, dtype=torch.float64)

    assert torch.autograd.gradcheck(
        lambda policy: policy_loss(policy, proximal, advantage, importance, clip_low=LOW, clip_high=HIGH).total,
        ((proximal + away_from_kinks).requires_grad_(),),
    )


def test_only_the_policy_is_differentiated() -> None:
    policy, proximal, behaviour = (torch.full((2,), -1.0).requires_grad_() for _ in range(3))
    importance = importance_ratio(proximal, behaviour, cap=2.0)

    policy_loss(policy, proximal, torch.ones(2), importance, clip_low=LOW, clip_high=HIGH).total.backward()

    assert not importance.requires_grad
    assert (True, False, False) == (policy.grad is not None, proximal.grad is not None, behaviour.grad is not None)


def test_importance_ratio_is_cut_off_above_only() -> None:
    ratio = importance_ratio(logs(0.5, 0.5, 0.5, 0.9), logs(0.5, 0.4, 0.1, 0.000001), cap=2.0)

    torch.testing.assert_close(ratio, torch.tensor([1.0, 1.25, 2.0, 2.0], dtype=torch.float64))
    torch.testing.assert_close(
        importance_ratio(logs(0.001), logs(0.1), cap=2.0), torch.tensor([0.01], dtype=torch.float64)
    )


def test_advantage_is_in_spreads_of_the_group() -> None:
    """The spread is that of a sample: 0.4 of a population of 5 are 0.4472."""
    reward = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.25])
    mean = torch.tensor([0.25, 0.25, 0.25, 1.0, 0.25])
    std = torch.tensor([0.4, 0.4, 0.4, 0.0, 0.0])
    count = torch.tensor([5.0, 5.0, 5.0, 2.0, 1.0])

    spread = 0.4 * math.sqrt(5 / 4) + 1e-4
    expected = torch.tensor([0.75 / spread, -0.25 / spread, -0.25 / spread, 0.0, 0.0])
    torch.testing.assert_close(group_advantage(reward, mean, std, count), expected)
    as_it_is = group_advantage(reward, mean, std, count, kind="Mean")
    torch.testing.assert_close(as_it_is, torch.tensor([0.75, -0.25, -0.25, 0.0, 0.0]))


@pytest.mark.parametrize("rewards", [np.array([1.0, 0.0, 0.5, 2.0]), np.array([1.0, 0.0])])
def test_advantage_can_leave_the_sample_itself_out_of_the_mean(rewards: Floats) -> None:
    """RLOO: each reward minus the mean of the others."""
    size = len(rewards)
    mean, std, count = (torch.full((size,), value) for value in (rewards.mean(), rewards.std(), float(size)))

    others = [(rewards.sum() - reward) / (size - 1) for reward in rewards]
    advantage = group_advantage(torch.tensor(rewards), mean, std, count, kind="LeaveOneOut")
    assert (rewards - others).tolist() == pytest.approx(advantage.tolist())


def test_equal_rewards_teach_nothing_also_when_their_mean_is_rounded() -> None:
    """Rewards of 0.1 have a mean and a spread that are off by rounding: 0.1 / epsilon of noise was trained on."""
    reward = torch.full((3,), 0.1)

    assert [0.0] * 3 == group_advantage(reward, reward + 1e-8, torch.full((3,), 1e-8), torch.full((3,), 3.0)).tolist()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_token_logp_is_of_the_distribution_that_was_sampled(temperature: float) -> None:
    logits = torch.tensor([[2.0, 1.0, -1.0], [0.0, 0.0, 0.0]])
    weights = [[math.exp(logit / temperature) for logit in row] for row in logits.tolist()]
    chances = [[weight / sum(row) for weight in row] for row in weights]

    logp, entropy = token_logp(logits, torch.tensor([1, 2]), temperature=temperature)

    torch.testing.assert_close(logp, torch.tensor([math.log(chances[0][1]), math.log(1 / 3)]))
    torch.testing.assert_close(entropy, torch.tensor([-sum(p * math.log(p) for p in row) for row in chances]))


def test_token_logp_is_computed_in_float32() -> None:
    logp, entropy = token_logp(torch.zeros(1, 3, dtype=torch.bfloat16), torch.tensor([0]), temperature=1.0)

    assert (torch.float32, torch.float32) == (logp.dtype, entropy.dtype)


def plain_loss(
    policy: Floats,
    proximal: Floats,
    behaviour: Floats,
    reference: Floats,
    advantage: Floats,
    weight: Floats,
    *,
    kl: tuple[float, KL],
) -> float:
    """Token by token, with nothing but NumPy."""
    total = 0.0
    for token in range(len(policy)):
        ratio = np.exp(policy[token] - proximal[token])
        free = ratio * advantage[token]
        held = min(max(ratio, 1 - LOW), 1 + HIGH) * advantage[token]
        importance = min(np.exp(proximal[token] - behaviour[token]), CAP)
        apart = policy[token] - reference[token]
        penalty = {"K1": apart, "K2": apart * apart / 2, "K3": np.exp(-apart) - 1 + apart}[kl[1]]
        total += weight[token] * (-min(free, held) * importance + kl[0] * penalty)
    return float(total)


@pytest.mark.parametrize("estimator", ["K1", "K2", "K3"])
@pytest.mark.parametrize("bypass", [False, True], ids=["recomputed", "bypass"])
def test_loss_and_gradient_are_those_of_plain_numpy(estimator: KL, bypass: bool) -> None:
    chance = np.random.default_rng(3)
    policy, proximal, behaviour, reference = (-chance.uniform(0.1, 2.0, 40) for _ in range(4))
    advantage, weight = chance.normal(size=40), chance.uniform(0.1, 1.0, 40)
    start = behaviour if bypass else proximal

    def plain(logp: Floats) -> float:
        return plain_loss(logp, start, behaviour, reference, advantage, weight, kl=(0.3, estimator))

    slopes = []
    for token in range(40):
        nudge = np.zeros(40)
        nudge[token] = 1e-6
        slopes.append((plain(policy + nudge) - plain(policy - nudge)) / 2e-6)

    logp = torch.tensor(policy, requires_grad=True)
    importance = importance_ratio(torch.tensor(start), torch.tensor(behaviour), cap=CAP)
    loss = policy_loss(
        logp, torch.tensor(start), torch.tensor(advantage), importance, torch.tensor(weight),
        clip_low=LOW, clip_high=HIGH,
    ).total + 0.3 * kl_penalty(logp, torch.tensor(reference), torch.tensor(weight), estimator=estimator)  # fmt: skip
    loss.backward()

    assert plain(policy) == pytest.approx(loss.item(), rel=1e-9)
    assert logp.grad is not None
    assert slopes == pytest.approx(logp.grad.tolist(), rel=1e-5, abs=1e-6)


ONE, TWO = torch.zeros(1), torch.zeros(2)


@pytest.mark.parametrize(
    "call",
    [
        lambda: importance_ratio(ONE, TWO, cap=2.0),
        lambda: group_advantage(TWO, ONE, TWO, TWO),
        lambda: group_advantage(TWO, TWO, TWO, ONE),
        lambda: importance_ratio(TWO, TWO, ONE, cap=2.0, level="Sequence"),
        lambda: importance_mask(TWO, ONE, TWO, level="Token", low=0.5, high=2.0),
        lambda: kl_ratio(TWO, TWO, ONE),
        lambda: kl_penalty(TWO, ONE, TWO, estimator="K3"),
        lambda: kl_penalty(TWO, TWO, ONE, estimator="K3"),
        lambda: policy_loss(TWO, TWO, ONE, TWO, clip_low=LOW, clip_high=HIGH),
        lambda: policy_loss(TWO, ONE, TWO, TWO, clip_low=LOW, clip_high=HIGH),
        lambda: policy_loss(TWO, TWO, TWO, ONE, clip_low=LOW, clip_high=HIGH),
        lambda: token_logp(torch.zeros(2, 3), torch.tensor([0]), temperature=1.0),
    ],
)
def test_tensors_of_different_tokens_are_refused(call: Callable[[], object]) -> None:
    """Broadcasting one log-probability over two tokens would train on wrong ones (H27)."""
    with pytest.raises(LengthMismatch, match="should be one"):
        call()
