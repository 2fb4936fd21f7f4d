"""Trials of mutants: pytest, with the plugin `trying`, reports which of them the tests let pass."""

from __future__ import annotations

import os
import pickle
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from mutants.work import FILE, Mutant, Work
from setup.environments import DEV
from setup.layout import CHECKOUT

PLUGINS = ("-p", "no:cacheprovider", "-p", "mutants.trying")
CHEAPLY = ("--assert=plain", "--tb=native")  # nobody reads why a mutant was killed
PYTEST = ("-m", "pytest", "-x", "-q", *PLUGINS, *CHEAPLY, "-c", "tests/pyproject.toml")
PARTS = ("operator", "operator/cli", *(f"workloads/{part}" for part in ("member", "agent", "rollout", "trainer")))


def trials(
    checkout: Path,
    mutants: list[Mutant],
    tests: Sequence[str],
    *,
    at_once: int,
    until: float | None = None,
    accepted: frozenset[int] = frozenset(),
    spare_s: int = 5,
) -> Iterator[tuple[Mutant, bool]]:
    """Yield each mutant that was tried, and whether it survived. Raises SystemExit if the tests fail without a mutant.

    checkout: a copy of the repository, in a directory of its own. tests: patterns of files. until: on the monotonic
    clock; later no mutant is begun. accepted, spare_s: see Work.
    """
    read, write = os.pipe()
    file, log = checkout.with_name("work"), checkout.with_name("log")
    file.write_bytes(pickle.dumps(Work(checkout, mutants, at_once, until, accepted, spare_s, results=write)))
    paths = sorted({path for pattern in tests for path in (checkout / "tests").glob(pattern)})
    # the copy's packages, not those that are installed
    path = os.pathsep.join([*(str(checkout / part) for part in PARTS), str(CHECKOUT.root / "tests")])
    environment = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", FILE: str(file)}
    with log.open("w") as output:
        pytest = subprocess.Popen(
            [CHECKOUT.python(DEV), *PYTEST, *paths],
            cwd=checkout, env=environment, stdout=output, stderr=subprocess.STDOUT, pass_fds=[write],
        )  # fmt: skip
    os.close(write)
    with os.fdopen(read) as results:
        for number, survives in map(str.split, results):
            yield mutants[int(number)], survives == "1"
    if pytest.wait():
        raise SystemExit(f"the tests fail without a mutant:\n{log.read_text()[-2000:]}")
