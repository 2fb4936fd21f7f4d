"""The images are the environments that everything else here runs in, and what is said of their pins holds."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tarfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from dockerfile import Dockerfile
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from setup.environments import IMAGES, ImageEnvironment
from setup.layout import CHECKOUT
from setup.localcluster import image_list
from setup.toolchain import UV

ROOT = CHECKOUT.root
FOLDER = ROOT / "workloads/images"
DOCKERFILE = Dockerfile.read(FOLDER / "Dockerfile")
VERSION = (ROOT / "operator/VERSION").read_text().strip()
TARGETS = ("operator", "agent", "rollout", "gpu", "gpu-cpu")
LOCAL = {"gpu": "gpu-cpu"}  # the local cluster has no GPU


def target(environment: ImageEnvironment) -> str:
    return LOCAL.get(environment.name, environment.name)


def commands(stage: str) -> str:
    return " && ".join(DOCKERFILE.stages[stage].all("RUN"))


def pins(path: str) -> dict[str, str]:
    lines = (ROOT / path).read_text().splitlines()
    found = (re.match(r"([\w.-]+)==([^ ;]+)", line) for line in lines)
    return {canonicalize_name(match[1]): match[2] for match in found if match}


@pytest.mark.parametrize("environment", IMAGES, ids=target)
def test_environment_is_made_from_the_files_that_the_local_one_is_made_from(environment: ImageEnvironment) -> None:
    libraries, ours = (commands(f"{target(environment)}-{part}") for part in ("libraries", "ours"))
    options = r'--compile-bytecode --require-hashes --python "\$\{ENVIRONMENT\}"'
    [synced] = re.findall(rf"uv pip sync {options} *((?: [\w./-]+)+)", libraries)
    options = r'--compile-bytecode --python "\$\{ENVIRONMENT\}" --prefix "\$\{OURS\}" --no-deps'
    [installed] = re.findall(rf"uv pip install {options}((?: \S+)+)", ours)
    assert environment.requirements == tuple(synced.split())
    assert environment.packages == tuple(re.findall(r'"\$\{WHEELS\}"/(\S+)/\*\.whl', installed))


@pytest.mark.parametrize("environment", IMAGES, ids=target)
def test_image_starts_and_sets_what_that_of_the_local_cluster_does(environment: ImageEnvironment) -> None:
    stages = DOCKERFILE.inherited(target(environment))
    local = image_list(CHECKOUT)[f"colocated-rl/{environment.name}:dev"]
    assert local["entrypoint"] == stages[-1].entrypoint
    assert local["env"] == {name: value for stage in stages for name, value in stage.environment.items()}


def test_tools_are_those_of_the_set_up() -> None:
    tools = {"uv": UV.partition("==")[2], "setuptools": pins("tests/requirements.txt")["setuptools"]}
    assert tools == pins("workloads/images/tools.txt")
    assert "--require-hashes --requirement workloads/images/tools.txt" in commands("tools")


def test_engine_is_the_release_that_the_tests_run() -> None:
    assert f"docker.io/lmsysorg/sglang:v{pins('workloads/gpu/engine.txt')['sglang']}" == DOCKERFILE.image_of("gpu")


@pytest.mark.parametrize("name", TARGETS)
def test_image_is_an_ordinary_users_and_its_base_is_pinned(name: str) -> None:
    users = [user for stage in DOCKERFILE.inherited(name) for user in stage.all("USER")]
    assert "65532:65532" == users[-1]
    assert re.search(r":v?\d+\.\d+\.\d+[\w.-]*$", DOCKERFILE.image_of(name))


@pytest.mark.parametrize("name", DOCKERFILE.stages)
def test_stage_uses_variables_that_every_builder_gives_it(name: str) -> None:
    """Its own ARG, or an ENV. Older podman hands no ARG on to a stage that stands on another, and docker does."""
    stage = DOCKERFILE.stages[name]
    used = {found for _, words in stage.instructions for found in re.findall(r"\$\{?([A-Z]\w*)", words)}
    own = {words.partition("=")[0] for words in stage.all("ARG")}
    assert used <= own.union(*(each.environment for each in DOCKERFILE.inherited(name)))


@pytest.mark.parametrize("name", ["operator", "agent", "rollout", "gpu-cpu"])
def test_libraries_are_made_of_nothing_that_changes_with_every_commit(name: str) -> None:
    """A builder that kept them then uses them again, and nodes have that layer."""
    stages = DOCKERFILE.inherited(f"{name}-libraries")
    copied = {file for stage in stages for words in stage.all("COPY") for file in words.split()[:-1]}
    lists = {word for word in commands(f"{name}-libraries").split() if word.endswith(".txt")}
    assert lists | {"workloads/images/tools.txt"} == {file for file in copied if not file.endswith(".py")}
    assert {"workloads/images/without_cuda.py"} >= {file for file in copied if file.endswith(".py")}


@pytest.mark.parametrize("name", ["operator", "agent", "rollout", "gpu-cpu"])
def test_image_holds_libraries_and_what_is_ours_and_nothing_they_were_made_with(name: str) -> None:
    copied = [words for stage in DOCKERFILE.inherited(name) for words in stage.all("COPY")]
    assert [
        f"--from={name}-libraries /opt/colocated-rl /opt/colocated-rl",
        f"--from={name}-ours /ours /opt/colocated-rl",
    ] == copied
    assert not [words for stage in DOCKERFILE.inherited(name) for words in stage.all("RUN")]


def test_chart_names_the_images_that_are_built() -> None:
    values = yaml.safe_load((ROOT / "charts/colocated-rl/values.yaml").read_text())["images"]
    named = {each["repository"] for each in values.values() if isinstance(each, dict)}
    assert {f"colocated-rl/{name}" for name in TARGETS} - {"colocated-rl/gpu-cpu"} == named


# ---------------------------------------------------------------------------------------------- the trainer's libraries
def needs_of_the_trainer() -> Iterator[Requirement]:
    """Yield the requirements of the trainer's wheel and the contract's, besides each other."""
    for folder, extras in (("operator", ()), ("workloads/trainer", ("reference",))):
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
        asked = [
            *project["dependencies"],
            *(need for extra in extras for need in project["optional-dependencies"][extra]),
        ]
        yield from (need for need in map(Requirement, asked) if not need.name.startswith("colocated-rl"))


@pytest.mark.parametrize("need", [*needs_of_the_trainer()], ids=lambda need: need.name)
def test_trainer_asks_for_nothing_that_the_engine_does_not_bring(need: Requirement) -> None:
    """`vendor.txt` is all that the engine's release resolves to: closed, so what its members need is in it too."""
    brought = pins("workloads/gpu/vendor.txt")
    assert need.name in brought
    assert need.specifier.contains(brought[need.name], prereleases=True), (
        f"the engine's image has {need.name} {brought[need.name]}"
    )


def test_vendors_list_is_of_the_release_that_is_pinned() -> None:
    assert pins("workloads/gpu/engine.txt").items() <= pins("workloads/gpu/vendor.txt").items()


# ----------------------------------------------------------------------------------------------------------- the script
@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """All that the script needs, and no builder."""
    folder = tmp_path / "programs"
    folder.mkdir()
    for name in ("bash", "dirname", "git", "tar", "mktemp", "rm", "cp"):
        found = shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(found)
    return folder


def build(programs: Path, *images: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": str(programs), "HOME": os.environ.get("HOME", "/"), **variables}
    return subprocess.run(
        [FOLDER / "build.sh", *images], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_without_a_builder_it_is_said_what_to_do(programs: Path) -> None:
    done = build(programs)
    assert 2 == done.returncode
    assert "there is no docker, podman or nerdctl on PATH; install one, or name yours" in done.stderr


@pytest.fixture
def recorder(programs: Path) -> Path:
    """Return the file to which a builder's arguments go, a line for each image, with
    a copy of what it builds beside it.
    """
    record, context = programs.with_name("said"), programs.with_name("context")
    podman = programs / "podman"  # there is none on the machines that run this
    podman.write_text(f'#!/usr/bin/env bash\necho "$@" >>{record}\n[ -e {context} ] || cp -r "${{@: -1}}" {context}\n')
    podman.chmod(0o755)
    return record


def test_labels_say_version_commit_and_source_where_that_is_known(programs: Path, recorder: Path) -> None:
    for source in ("", "https://git.example.com/rl"):
        assert 0 == build(programs, "agent", SOURCE=source).returncode
    labels = [
        dict(re.findall(r"--label org\.opencontainers\.image\.(\w+)=(\S+)", line))
        for line in recorder.read_text().splitlines()
    ]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    known = {"title": "agent", "version": VERSION, "revision": commit.stdout.strip()}
    assert [known, known | {"source": "https://git.example.com/rl"}] == labels


def test_images_are_built_of_what_is_committed_and_named_as_the_chart_names_them(
    programs: Path, recorder: Path, tmp_path: Path
) -> None:
    done = build(programs, "operator", "gpu", REPOSITORY="registry.example.com/rl", BUILD_ARGS="--pull")
    assert 0 == done.returncode, done.stderr
    for line, image in zip(recorder.read_text().splitlines(), ("operator", "gpu"), strict=True):
        assert f"--target {image} --tag registry.example.com/rl/{image}:{VERSION} " in line
        assert "--pull" in line
    context = recorder.with_name("context")
    archive = subprocess.run(
        ["git", "archive", "HEAD", "operator", "workloads", "tests/engine_cpu"],
        cwd=ROOT, capture_output=True, timeout=60, check=True,
    )  # fmt: skip
    (tmp_path / "archive.tar").write_bytes(archive.stdout)
    with tarfile.open(tmp_path / "archive.tar") as committed:
        assert sorted(committed.getnames()) == sorted(str(path.relative_to(context)) for path in context.rglob("*"))


def test_bill_of_materials_lists_what_is_installed_and_is_the_same_each_time(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("sbom", FOLDER / "sbom.py")
    assert spec is not None
    assert spec.loader is not None
    sbom = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sbom)
    bill = sbom.bill_of_materials("some")
    assert bill == sbom.bill_of_materials("some")
    versions = {component["name"]: component["version"] for component in bill["components"]}
    assert pins("operator/requirements.txt").items() <= versions.items()
    assert {"type": "container", "name": "colocated-rl/some"} == bill["metadata"]["component"]
    (tmp_path / "elsewhere-1.0.dist-info").mkdir()
    (tmp_path / "elsewhere-1.0.dist-info/METADATA").write_text("Name: elsewhere\nVersion: 1.0\n")
    components = sbom.bill_of_materials("some", str(tmp_path))["components"]
    assert versions | {"elsewhere": "1.0"} == {component["name"]: component["version"] for component in components}
