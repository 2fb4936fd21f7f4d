"""Each thing that a machine lacks is reported in one line, with what to do."""

from dataclasses import replace

import pytest

from setup.layout import CHECKOUT
from setup.preflight import DISK_EMPTY_GIB, MEMORY_JOB_GIB, MachineFacts, inspect, problems

GOOD = MachineFacts(
    system="Linux",
    architecture="x86_64",
    python=(3, 11),
    missing_programs=(),
    has_venv=True,
    namespaces=None,
    has_ids=True,
    disk_free_gib=DISK_EMPTY_GIB,
    disk_needed_gib=DISK_EMPTY_GIB,
    disk_path="/home/someone/colocated-rl",
    memory_gib=MEMORY_JOB_GIB,
    memory_needed_gib=MEMORY_JOB_GIB,
)


def test_machine_that_has_everything_has_no_problem() -> None:
    assert [] == list(problems(GOOD))


def test_this_machine_can_run_what_it_is_running() -> None:
    machine = inspect(CHECKOUT, runs_jobs=False)
    assert "Linux" == machine.system
    assert () == machine.missing_programs
    assert machine.has_venv


@pytest.mark.parametrize(
    ("machine", "subject", "fix"),
    [
        (replace(GOOD, system="Darwin"), "system: Darwin", "use a Linux machine"),
        (replace(GOOD, architecture="riscv64"), "architecture: riscv64", "use such a machine"),
        (replace(GOOD, missing_programs=("git",)), "git: not on PATH", "`apt-get install git`"),
        (replace(GOOD, python=(3, 14)), "python3: 3.14, but", "`make PYTHON=python3.13 ...`"),
        (replace(GOOD, has_venv=False), "python3: has no ensurepip", "`apt-get install python3-venv`"),
        (replace(GOOD, namespaces="Operation not permitted"), "namespaces: refused (Operation", "run as root"),
        (replace(GOOD, has_ids=False), "users: pods of a job run as users", "`apt-get install uidmap`"),
        (replace(GOOD, disk_free_gib=3.4), "disk: 3 GiB free at /home/someone/colocated-rl", "free some"),
        (replace(GOOD, memory_gib=2), "memory: 2 GiB available", "use a larger machine"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_missing_prerequisite_is_one_line_with_the_fix(machine: MachineFacts, subject: str, fix: str) -> None:
    (line,) = problems(machine)
    assert line.startswith(subject)
    assert fix in line
    assert "\n" not in line


def test_several_missing_prerequisites_are_all_named_at_once() -> None:
    machine = replace(GOOD, missing_programs=("git", "make"), memory_gib=1)
    assert ["git", "make", "memory"] == [line.partition(":")[0] for line in problems(machine)]
