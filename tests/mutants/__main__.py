"""Changes the pure core in small ways, and names each change that no fast test notices: `make mutants`.

The tests that are named here for a file run with each mutant, those first that are quick and ran the changed statement.
A survivor that can't be told from the original is in `accepted.toml` with its reason; any other one fails the run, as
does an accepted one that a quick test notices by now, or that can't be made any more.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, Self

from mutants.changed import lines_since
from mutants.making import mutants_of
from mutants.trials import trials
from mutants.work import Mutant
from setup.layout import CHECKOUT

ACCEPTED = Path(__file__).with_name("accepted.toml")

_OF_AGENT = ("unit/test_agent_engines.py", "unit/test_agent_facts*.py", "unit/test_agent_hazards.py")
# Not the searches test_plan_model and test_plan_properties: they are slow, and no test states what they alone notice.
_OF_PLAN = ("unit/test_ladder.py", "unit/test_plan.py", "unit/test_plan_[!mp]*.py")
_PLANNER = "operator/colocated_rl_operator/planner"
_AGENT = "workloads/agent/colocated_rl_agent"
_ROLLOUT = "workloads/rollout/colocated_rl_rollout"
TARGETS: dict[str, tuple[str, ...]] = {  # file of the core -> the tests that must notice
    "operator/colocated_rl_api/holders.py": ("unit/test_holders.py",),
    "operator/colocated_rl_api/ladder.py": _OF_PLAN,
    f"{_PLANNER}/failure_policy.py": _OF_PLAN,
    f"{_PLANNER}/notices.py": _OF_PLAN,
    f"{_PLANNER}/plan.py": _OF_PLAN,
    f"{_PLANNER}/resizing.py": _OF_PLAN,
    f"{_PLANNER}/roster.py": _OF_PLAN,
    f"{_PLANNER}/size.py": _OF_PLAN,
    f"{_PLANNER}/targets.py": _OF_PLAN,
    f"{_AGENT}/lanes/update_check.py": ("unit/test_agent_update_check.py",),
    f"{_AGENT}/planner/engines.py": _OF_AGENT,
    f"{_AGENT}/planner/next_actions.py": _OF_AGENT,
    f"{_AGENT}/planner/spans.py": ("unit/test_agent_spans.py",),
    f"{_ROLLOUT}/rules/filters.py": ("unit/test_rollout_filters.py",),
    f"{_ROLLOUT}/rules/overlong.py": ("unit/test_rollout_overlong.py",),
    f"{_ROLLOUT}/rules/resume.py": ("unit/test_rollout_resume.py",),
    f"{_ROLLOUT}/rules/staleness.py": ("unit/test_rollout_staleness.py",),
    f"{_ROLLOUT}/sealer.py": ("unit/test_rollout_sealer.py",),
    f"{_ROLLOUT}/store/batches.py": tuple(f"unit/test_rollout_{part}.py" for part in ("batches", "recording", "store")),
    "workloads/trainer/colocated_rl_trainer/grpo/batch.py": ("contract/test_trainer_batch.py",),
    "workloads/trainer/colocated_rl_trainer/grpo/loss.py": ("contract/test_trainer_loss.py",),
}


class Survivor(NamedTuple):
    file: str
    was: str
    now: str

    @classmethod
    def of(cls, mutant: Mutant) -> Self:
        return cls(mutant.file, mutant.was, mutant.now)

    def __str__(self) -> str:
        return f"{self.file}\n  - {self.was}\n  + {self.now}"


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__)
    parser.add_argument("--only", default="", help="files whose path contains this")
    parser.add_argument("--since", help="commit: mutants of lines that changed after it")
    parser.add_argument("--within", type=float, metavar="SECONDS", help="try no further mutants past this time")
    parser.add_argument("--at-once", type=int, default=2, help="mutants, each in a process")
    options = parser.parse_args(words)
    files = [file for file in TARGETS if options.only in file]
    if not files:
        print(f"no file of the core has {options.only!r} in its path: they are {', '.join(TARGETS)}")
        return 2
    until = None if options.within is None else time.monotonic() + options.within
    accepted = {
        Survivor(entry["file"], entry["was"], entry["now"])
        for entry in tomllib.loads(ACCEPTED.read_text()).get("accepted", [])
        if entry["file"] in files
    }
    found: set[Survivor] = set()
    for tests in dict.fromkeys(TARGETS[file] for file in files):
        together = [file for file in files if TARGETS[file] == tests]
        for survivor in run(together, tests, accepted, options.since, options.at_once, until):
            found.add(survivor)
            if survivor not in accepted:
                print(f"survived: {survivor}", flush=True)
    gone = set() if options.since or options.within else accepted - found
    for survivor in sorted(gone):
        print(f"no survivor any more, take it out of {ACCEPTED.name}: {survivor}")
    return 1 if found - accepted or gone else 0


def run(
    files: Sequence[str],
    tests: Sequence[str],
    accepted: Set[Survivor],
    since: str | None,
    at_once: int,
    until: float | None,
) -> Iterator[Survivor]:
    """Yield the mutants of some files that their tests let pass. Raises SystemExit where they fail without a mutant.

    accepted: expected to survive. until: on the monotonic clock; what is not tried by then is counted and left.
    """
    began, cpu_began = time.monotonic(), processor_s()
    with TemporaryDirectory() as place:
        checkout = Path(place) / "checkout"
        changed = {file: None if since is None else lines_since(since, file, root=CHECKOUT.root) for file in files}
        if not any(lines is None or lines for lines in changed.values()):
            return
        copy_checkout(checkout)
        mutants = [each for file in files for each in mutants_of(file, (checkout / file).read_text(), changed[file])]
        if not mutants:
            return
        print(f"{', '.join(files)}: {len(mutants)} mutants", flush=True)
        expected = frozenset(number for number, mutant in enumerate(mutants) if Survivor.of(mutant) in accepted)
        tried = survived = 0
        for mutant, survives in trials(checkout, mutants, tests, at_once=at_once, until=until, accepted=expected):
            tried, survived = tried + 1, survived + survives
            if survives:
                yield Survivor.of(mutant)
        took_s, cpu_s = time.monotonic() - began, processor_s() - cpu_began
        print(
            f"{tried} tried, {survived} survived, {len(mutants) - tried} not tried, "
            f"{took_s:.0f} s, {cpu_s:.0f} s of processor time",
            flush=True,
        )


def processor_s() -> float:
    """Return the processor time of this process and of all that it has waited for."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def copy_checkout(into: Path) -> None:
    """Copy the files of this checkout, changes that are not committed among them, as a repository with its history."""
    subprocess.run(["git", "clone", "--quiet", "--shared", CHECKOUT.root, into], check=True)
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=CHECKOUT.root, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        if (CHECKOUT.root / name).is_file():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            (into / name).write_bytes((CHECKOUT.root / name).read_bytes())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
