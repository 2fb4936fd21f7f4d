"""Changes the pure core in small ways, and names each change that no fast test notices: `make mutants`.

Cosmic Ray makes the mutants, one at a time, in a copy of the checkout, and runs the tests that are named here for the
file. A survivor that can't be told from the original is in `accepted.toml` with its reason; any other one fails the
run, as does an accepted one that is killed by now or can't be made any more.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import shlex
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec, TestOutcome, WorkerOutcome, WorkItem, WorkResult

from mutants.changed import lines_since
from setup.environments import DEV
from setup.layout import CHECKOUT

ACCEPTED = Path(__file__).with_name("accepted.toml")
AT_ONCE = 2
MUTANT_S = 120.0  # for the tests of one mutant: past it, it loops for ever and is killed

_OF_PLAN = (
    "unit/test_plan.py", "unit/test_plan_failures.py", "unit/test_plan_retry.py", "unit/test_plan_resident.py",
    "unit/test_plan_disaggregated.py", "unit/test_plan_one_side.py", "unit/test_plan_reference.py",
    "unit/test_plan_reference_apart.py", "unit/test_plan_model.py", "unit/test_plan_properties.py",
)  # fmt: skip
_OF_AGENT = ("unit/test_agent_facts.py", "unit/test_agent_facts_apart.py", "unit/test_agent_hazards.py")
_OF_WORKER = ("unit/test_rollout_worker.py", "unit/test_rollout_store.py")
_PLANNER = "operator/colocated_rl_operator/planner"
_ROLLOUT = "workloads/rollout/colocated_rl_rollout"
TARGETS: dict[str, tuple[str, ...]] = {  # file of the core -> the tests that must notice, quickest first
    "operator/colocated_rl_api/ladder.py": (*_OF_AGENT, *_OF_PLAN),
    f"{_PLANNER}/failure_policy.py": _OF_PLAN,
    f"{_PLANNER}/plan.py": _OF_PLAN,
    f"{_PLANNER}/roster.py": _OF_PLAN,
    f"{_PLANNER}/targets.py": _OF_PLAN,
    "workloads/agent/colocated_rl_agent/planner/next_actions.py": _OF_AGENT,
    f"{_ROLLOUT}/rules/filters.py": ("unit/test_rollout_filters.py",),
    f"{_ROLLOUT}/rules/overlong.py": ("unit/test_rollout_overlong.py",),
    f"{_ROLLOUT}/rules/resume.py": ("unit/test_rollout_resume.py", *_OF_WORKER),
    f"{_ROLLOUT}/rules/staleness.py": ("unit/test_rollout_staleness.py",),
    f"{_ROLLOUT}/sealer.py": ("unit/test_rollout_sealer.py", *_OF_WORKER),
    f"{_ROLLOUT}/store/batches.py": ("unit/test_rollout_batches.py", *_OF_WORKER),
    "workloads/trainer/colocated_rl_trainer/grpo/loss.py": ("contract/test_trainer_loss.py",),
}

# What no person would write by mistake, in operators of Cosmic Ray: it would be most of the mutants.
UNLIKELY = ("RShift", "LShift", "BitAnd", "BitOr", "BitXor", "Pow", "FloorDiv", "Mod", "Is", "IsNot")


class Survivor(NamedTuple):
    file: str
    was: str
    now: str

    def __str__(self) -> str:
        return f"{self.file}\n  - {self.was}\n  + {self.now}"


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__)
    parser.add_argument("--only", default="", help="files whose path contains this")
    parser.add_argument("--since", help="commit: mutants of lines that changed after it")
    parser.add_argument("--within", type=float, metavar="SECONDS", help="try no further mutants past this time")
    options = parser.parse_args(words)
    files = [file for file in TARGETS if options.only in file]
    if not files:
        print(f"no file of the core has {options.only!r} in its path: they are {', '.join(TARGETS)}")
        return 2
    until = None if options.within is None else time.monotonic() + options.within
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found: set[Survivor] = set().union(*pool.map(lambda file: run(file, options.since, until), files))
    accepted = {
        Survivor(entry["file"], entry["was"], entry["now"])
        for entry in tomllib.loads(ACCEPTED.read_text()).get("accepted", [])
        if entry["file"] in files
    }
    for survivor in sorted(found - accepted):
        print(f"survived: {survivor}")
    gone = set() if options.since or options.within else accepted - found
    for survivor in sorted(gone):
        print(f"no survivor any more, take it out of {ACCEPTED.name}: {survivor}")
    return 1 if found - accepted or gone else 0


def run(file: str, since: str | None, until: float | None) -> set[Survivor]:
    """Return the mutants of one file that its tests let pass. Raises SystemExit where they fail without a mutant.

    until: on the monotonic clock; what is not tried by then is counted and left.
    """
    changed = None if since is None else lines_since(since, file, root=CHECKOUT.root)
    if changed == set():
        return set()
    with TemporaryDirectory() as place:
        checkout = Path(place) / "checkout"
        copy_checkout(checkout)
        pytest = CHECKOUT.environment(DEV) / "bin/pytest"
        options = ("-x", "-q", "-p", "no:cacheprovider", "-c", "tests/pyproject.toml")
        command = [str(pytest), *options, *(f"tests/{name}" for name in TARGETS[file])]
        config = checkout / "mutants.toml"
        config.write_text(
            f'[cosmic-ray]\nmodule-path = "{file}"\ntimeout = {MUTANT_S}\nexcluded-modules = []\n'
            f'test-command = "{shlex.join(command)}"\n'
            '[cosmic-ray.distributor]\nname = "local"\n'
        )
        session = checkout / "mutants.sqlite"
        cosmic_ray(checkout, "init", config, session)
        with use_db(session) as database:
            skip(database, lambda mutation: not is_likely(mutation))
            skip(database, outside_code((checkout / file).read_text()))
            if changed is not None:
                skip(database, lambda mutation: not changed & {*range(mutation.start_pos[0], mutation.end_pos[0] + 1)})
            left = len(list(database.pending_work_items))
            if not left:
                return set()
            print(f"{file}: {left} mutants", flush=True)
            require_success_without_a_mutant(file, command, checkout)
            cosmic_ray(checkout, "exec", config, session, until=until)
            ended, left = list(database.completed_work_items), len(list(database.pending_work_items))
        survivors = [(item, result) for item, result in ended if result.test_outcome is TestOutcome.SURVIVED]
        tried = sum(result.worker_outcome is WorkerOutcome.NORMAL for _, result in ended)
        print(f"{file}: {tried} tried, {len(survivors)} survived, {left} not tried", flush=True)
        return {survivor(file, result) for _, result in survivors}


def require_success_without_a_mutant(file: str, command: Sequence[str], checkout: Path) -> None:
    env = environment(checkout)
    plain = subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True, check=False)
    if plain.returncode:
        raise SystemExit(f"{file}: its tests fail without a mutant\n{plain.stdout[-2000:]}")


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


def environment(checkout: Path) -> dict[str, str]:
    """Return variables with which the copy's packages are imported, not those that are installed."""
    packages = (
        "operator",
        "operator/cli",
        *(f"workloads/{part}" for part in ("member", "agent", "rollout", "trainer")),
    )
    path = os.pathsep.join(str(checkout / package) for package in packages)
    return os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}


def cosmic_ray(checkout: Path, command: str, config: Path, session: Path, *, until: float | None = None) -> None:
    """Run a command of Cosmic Ray. Past `until` it is ended, after the mutants that it has tried by then."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(
            [sys.executable, "-m", "cosmic_ray.cli", command, config, session],
            cwd=checkout, env=environment(checkout), check=True, stdout=subprocess.DEVNULL,
            timeout=None if until is None else max(1.0, until - time.monotonic()),
        )  # fmt: skip


# ------------------------------------------------------------------------------------------------- which mutants
def skip(database: WorkDB, is_skipped: Callable[[MutationSpec], bool]) -> None:
    items: list[WorkItem] = list(database.pending_work_items)
    skipped = [item.job_id for item in items if any(map(is_skipped, item.mutations))]
    database.set_multiple_results(skipped, WorkResult(output="skipped", worker_outcome=WorkerOutcome.SKIPPED))


def is_likely(mutation: MutationSpec) -> bool:
    return not any(part in UNLIKELY for part in mutation.operator_name.split("_")[1:])


def outside_code(source: str) -> Callable[[MutationSpec], bool]:
    """Return whether a mutation is of an annotation, or of a `*` that is no operator: neither changes what is done."""
    tree = ast.parse(source)
    operators = [node for node in ast.walk(tree) if isinstance(node, ast.BinOp)]
    written = [*ranges_of_annotations(tree)]

    def is_outside(mutation: MutationSpec) -> bool:
        at = mutation.start_pos
        if any(start <= at < end for start, end in written):
            return True
        if "ReplaceBinaryOperator" not in mutation.operator_name:
            return False
        return not any(end_of(node.left) <= at < start_of(node.right) for node in operators)

    return is_outside


def ranges_of_annotations(tree: ast.Module) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    for node in ast.walk(tree):
        for name in ("annotation", "returns"):
            if isinstance(found := getattr(node, name, None), ast.expr):
                yield start_of(found), end_of(found)


def start_of(node: ast.expr) -> tuple[int, int]:
    return node.lineno, node.col_offset


def end_of(node: ast.expr) -> tuple[int, int]:
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return node.end_lineno, node.end_col_offset


def survivor(file: str, result: WorkResult) -> Survivor:
    lines = (result.diff or "").splitlines()
    was = [line[1:].strip() for line in lines if line.startswith("-") and not line.startswith("---")]
    now = [line[1:].strip() for line in lines if line.startswith("+") and not line.startswith("+++")]
    return Survivor(file, " ".join(was), " ".join(now))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
