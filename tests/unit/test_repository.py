"""The shape of the repository: what an import, a wheel or a requirement file would get wrong in silence."""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DISTRIBUTIONS = (
    "operator", "operator/cli", "workloads/member", "workloads/agent", "workloads/rollout", "workloads/trainer",
)  # fmt: skip
REQUIREMENTS = sorted(ROOT.glob("[a-z]*/**/requirements.txt"))
ENGINE = ROOT / "workloads/gpu/engine.txt"


def output_of(program: str, *, cwd: Path = ROOT) -> str:
    """Return what a fresh interpreter prints, with the working directory first on its path."""
    answer = subprocess.run(
        [sys.executable, "-c", program], cwd=cwd, capture_output=True, text=True, timeout=60, check=True
    )
    return answer.stdout.strip()


def pins(path: Path) -> Iterator[tuple[str, str]]:
    """Yield name and requirement, without its hashes."""
    for requirement, _ in hashed_pins(path):
        yield requirement.partition("==")[0], requirement


def hashed_pins(path: Path) -> Iterator[tuple[str, list[str]]]:
    text = re.sub(r"#.*", "", path.read_text()).replace("\\\n", " ")
    for line in filter(None, map(str.strip, text.splitlines())):
        requirement, *hashes = map(str.strip, line.split("--hash="))
        yield requirement, hashes


@pytest.mark.parametrize("place", [ROOT, ROOT / "operator"], ids=["root", "operator"])
def test_operator_is_the_standard_librarys_wherever_python_starts(place: Path) -> None:
    standard_library = Path(output_of("import sysconfig; print(sysconfig.get_path('stdlib'))"))
    assert standard_library / "operator.py" == Path(output_of("import operator; print(operator.__file__)", cwd=place))


def test_operator_is_a_folder_and_no_package() -> None:
    assert [] == sorted(path.name for path in (ROOT / "operator").glob("*.py"))


def test_tests_are_no_package_so_that_none_can_be_installed() -> None:
    assert not (ROOT / "tests" / "__init__.py").exists()
    assert not (ROOT / "pyproject.toml").exists(), "at the root it would put operator/ into a wheel"


def test_make_help_explains_every_target() -> None:
    text = (ROOT / "Makefile").read_text()
    explained = set(re.findall(r"^([a-z0-9-]+):.* ## ", text, re.MULTILINE))
    steps = {"setup-dev", *re.findall(r"^([a-z0-9-]+-layer):", text, re.MULTILINE)}  # of the others, not for people
    assert set(re.findall(r"^\.PHONY: (.+)$", text, re.MULTILINE)) == explained | steps


def test_ci_runs_what_everybody_runs() -> None:
    commands = [
        "make test",
        "make fuzz FUZZ_S=60 SEED=1",
        "if ((SECONDS > 4400)); then",
        '  echo "make test-slow BUT=release is left out: these cores are too slow for it in the time that is left"',
        "  exit",
        "fi",
        "make test-slow BUT=release",
        "if ((SECONDS > 3300)); then",
        '  echo "make e2e-kueue is left out: these cores are too slow for it in the time that is left"',
        "  exit",
        "fi",
        "exec make e2e-kueue",
    ]
    assert commands == (ROOT / ".ci/run").read_text().splitlines()[-len(commands) :]


def test_commits_are_checked_by_our_own_commands() -> None:
    hooks = [
        hook
        for repository in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
        for hook in repository["hooks"]
    ]
    assert {"lint", "types", "generated", "mutants"} == {hook["id"] for hook in hooks}
    assert {"system"} == {hook["language"] for hook in hooks}  # of which nothing is downloaded


def test_licence_is_one_and_said_by_every_distribution() -> None:
    assert ["Apache License", "Version 2.0, January 2004"] == [
        line.strip() for line in (ROOT / "LICENSE").read_text().splitlines() if line
    ][:2]
    projects = [tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"] for folder in DISTRIBUTIONS]
    assert {"Apache-2.0"} == {project["license"] for project in projects}


@pytest.mark.parametrize("folder", DISTRIBUTIONS)
def test_every_package_says_that_it_is_typed(folder: str) -> None:
    packages = [path.parent for path in (ROOT / folder).glob("colocated_rl_*/__init__.py")]
    assert packages
    assert [] == [package.name for package in packages if not (package / "py.typed").exists()]


def test_all_distributions_have_one_version() -> None:
    versions = {(ROOT / folder / "VERSION").resolve() for folder in DISTRIBUTIONS}
    assert {ROOT / "operator" / "VERSION"} == versions


def test_contract_asks_for_pydantic_alone() -> None:
    project = tomllib.loads((ROOT / "operator/pyproject.toml").read_text())["project"]
    assert ["pydantic"] == [requirement.partition(">")[0] for requirement in project["dependencies"]]


def test_trainer_helper_asks_for_the_contract_and_a_fast_hash_alone() -> None:
    project = tomllib.loads((ROOT / "workloads/trainer/pyproject.toml").read_text())["project"]
    assert ["colocated-rl", "xxhash"] == [requirement.partition(">")[0] for requirement in project["dependencies"]]


def test_trainer_helper_is_imported_without_any_library_of_tensors() -> None:
    absent = dict.fromkeys(["torch", "numpy", "transformers", "safetensors"])
    script = f"import sys; sys.modules |= {absent}; import colocated_rl_trainer.protocol.rank_server; print('imported')"
    assert "imported" == output_of(script)


@pytest.mark.parametrize("path", [*REQUIREMENTS, ENGINE], ids=lambda path: str(path.relative_to(ROOT)))
def test_each_pin_has_the_hashes_of_its_files(path: Path) -> None:
    found = list(hashed_pins(path))
    assert found
    assert [] == [pin for pin, hashes in found if not hashes]
    assert [] == [one for _, hashes in found for one in hashes if not re.fullmatch(r"sha256:[0-9a-f]{64}", one)]


@pytest.mark.parametrize("path", [*REQUIREMENTS, ENGINE], ids=lambda path: str(path.relative_to(ROOT)))
def test_requirement_files_pin_everything_and_name_no_index(path: Path) -> None:
    unpinned = [requirement for name, requirement in pins(path) if "==" not in requirement or name.startswith("-")]
    assert [] == unpinned


def test_no_library_has_two_versions_in_the_project() -> None:
    everything = {requirement.partition(" ;")[0] for _, requirement in pins(ROOT / "tests/requirements.txt")}
    ours = {pin.partition("==")[0] for pin in everything}
    besides = {
        ROOT / f"tests/{name}/requirements.txt"
        for name in ("audit", "page", "peers", "website", "trained_model", "fuzz", "mutants", "release")
    }  # what only they have is no part of it
    alone = ROOT / "tests/frameworks/requirements.txt"  # asks for other versions, and is in no process of ours
    others = {
        requirement.partition(" ;")[0]
        for path in REQUIREMENTS
        if path != alone
        for name, requirement in pins(path)
        if path not in besides or name in ours
    }
    assert set() == others - everything


def test_contributors_find_every_import_contract() -> None:
    settings = tomllib.loads((ROOT / "tests/pyproject.toml").read_text())
    contracts = sorted(contract["name"] for contract in settings["tool"]["importlinter"]["contracts"])
    table = re.search(r"\| about \| contract \|\n\|---\|---\|\n((?:\|.*\n)+)", (ROOT / "CONTRIBUTING.md").read_text())
    assert table is not None
    assert contracts == sorted(row.split("|")[2].strip() for row in table[1].splitlines())
