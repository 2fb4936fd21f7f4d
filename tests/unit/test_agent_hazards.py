"""Each habit of the engine that is a hazard to the agent has a test that carries its number."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
ALL = range(1, 61)
OF_OTHERS = {
    27: "lengths of what came back: the rollout controller drops and counts",
    28: "routed experts: the rollout controller asks for them",
    29: "what is left of a budget: the rollout controller",
    30: "what starts anew at a seam: the rollout controller refuses it",
    32: "samples that are dropped in silence: the rollout controller",
    33: "prefixes that are computed again: the rollout controller",
    34: "samples that are interrupted again and again: the rollout controller",
    35: "all parked requests at once: the rollout controller paces them",
    36: "routing to a replica that is gone: the rollout controller",
    49: "an end that an abort hides: the rollout controller looks for it",
    53: "tensors sent in buckets: this agent updates from files",
}


def test_every_hazard_of_the_agent_has_a_test_that_carries_its_number() -> None:
    text = "\n".join(path.read_text() for path in TESTS.glob("*/test_*.py"))
    names = re.findall(r"def test_((?:h\d+_)+)", text)
    shown = {int(number) for name in names for number in re.findall(r"\d+", name)}
    assert set() == set(ALL) - shown - set(OF_OTHERS)
