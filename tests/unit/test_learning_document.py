"""These tests check the page about repeated runs of the demo, and what pairs of them can tell."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from colocated_rl_api.job import ColocatedRLJobSpec
from colocated_rl_cli.draw.figures import read_figures
from colocated_rl_cli.evidence.records import Records
from examples.arithmetic.demo import HERE
from examples.arithmetic.pairs import compared, verdict
from examples.arithmetic.prove_learning import DOCUMENT, Kind, document, of_others, older_share, seeded

JOB = yaml.safe_load((HERE / "job.yaml").read_text())


@pytest.fixture
def run() -> Records:
    return Records.read(Path(__file__).parent / "records/run.json")


def ending_at(run: Records, mean: float) -> Records:
    """The records with another outcome of the last evaluation."""
    last = read_figures(run.lines).last
    assert last is not None
    lines: list[dict[str, Any]] = [dict(line) for line in run.lines]
    for line in lines:
        if line["event"] == "evaluation ended" and line["step"] == last.step:
            line["mean"] = mean
    return replace(run, lines=lines)


@pytest.mark.parametrize("kind", Kind)
def test_each_kind_of_run_changes_what_it_is_named_after_and_stays_a_valid_job(kind: Kind) -> None:
    job = seeded(JOB, kind, 3)
    spec = ColocatedRLJobSpec.model_validate(job["spec"])
    assert (spec.rollout.max_staleness == 0) is (kind is Kind.NEWEST)
    assert (job["spec"]["trainer"]["config"]["learningRate"] == 0) is (kind is Kind.CONTROL)
    assert 3_000_000 == job["spec"]["rollout"]["prompts"]["reasoningGym"]["seed"]
    assert JOB == yaml.safe_load((HERE / "job.yaml").read_text())


def test_runs_are_compared_with_those_of_their_own_seed(run: Records) -> None:
    ends = {"newest-2": 0.80, "run-1": 0.84, "newest-1": 0.85, "run-2": 0.83, "run-3": 0.1}
    text = document({name: ending_at(run, mean) for name, mean in ends.items()}, JOB)
    step = read_figures(run.lines).evaluations[-1].step
    assert f"| {step} | 2 | +0.010 | 0.020 | -0.244 to +0.264 | no difference detected" in text
    rows = [line.split(" ")[1] for line in text.splitlines() if line.startswith(("| run-", "| newest-"))]
    assert ["run-1", "run-2", "run-3", "newest-1", "newest-2"] == rows


def test_what_other_examples_learned_stays_when_the_page_is_written_anew(run: Records) -> None:
    others = of_others(DOCUMENT.read_text())
    assert others.startswith("\n## A trained public model\n")
    assert others == of_others(document({"run-1": run}, JOB) + others)
    assert "" == of_others(document({"run-1": run}, JOB))


def test_without_pairs_nothing_is_compared(run: Records) -> None:
    assert "newest weights alone" not in document({"run-1": run, "newest-2": run}, JOB)


def test_share_of_older_tokens_is_of_all_that_were_trained(run: Records) -> None:
    batches = read_figures(run.lines).batches
    old = sum(count for batch in batches for age, count in batch.staleness.items() if age)
    assert 0 < old < sum(batch.tokens for batch in batches)
    assert older_share(read_figures(run.lines)) == pytest.approx(old / sum(batch.tokens for batch in batches))


def test_a_difference_is_reported_as_far_as_the_pairs_tell_it() -> None:
    few = compared([(0.822, 0.814), (0.848, 0.816), (0.838, 0.812)])
    assert few is not None
    assert (-0.022, 0.0072, -0.053, 0.009) == pytest.approx((few.mean, few.error, few.low, few.high), abs=5e-4)
    assert "no difference detected; a loss above 0.053 is excluded" == verdict(few)
    pairs = [(0.8, 0.7), (0.9, 0.81), (0.85, 0.74)]
    lower, higher = compared(pairs), compared([(second, first) for first, second in pairs])
    assert lower is not None
    assert higher is not None
    assert "lower, by 0.075 to 0.125" == verdict(lower)
    assert "higher, by at least 0.075" == verdict(higher)
    assert compared([(0.8, 0.7)]) is None
