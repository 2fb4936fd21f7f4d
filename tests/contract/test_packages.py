"""These tests install what users install: our wheels, each with its own requirements
only, and the contents of the images.
"""

import json
import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
from documents.blocks import blocks

from setup.layout import CHECKOUT
from setup.localcluster import IMAGE_ROOT
from setup.toolchain import clean_environment

INSTALL_S = 300.0
OF_PYDANTIC = {"annotated-types", "pydantic", "pydantic-core", "typing-extensions", "typing-inspection"}


def wheel(folder: str) -> Path:
    (path,) = (CHECKOUT.wheels / folder).glob("*/*.whl")
    return path


def run(*words: str | Path, cwd: Path | None = None) -> str:
    command = [str(word) for word in words]
    environment = clean_environment()
    answer = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=INSTALL_S, check=False
    )
    assert answer.returncode == 0, f"{' '.join(command)}: {answer.stderr}"
    return answer.stdout.strip()


def libraries(python: Path) -> set[str]:
    listed = json.loads(run(CHECKOUT.uv, "pip", "list", "--format", "json", "--python", python))
    return {library["name"] for library in listed}


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """Return the interpreter of an empty environment outside the checkout."""
    run(CHECKOUT.uv, "venv", "--python", CHECKOUT.python("dev").resolve(), tmp_path / "environment")
    return tmp_path / "environment/bin/python"


def test_contract_is_installed_and_imported_with_pydantic_alone(python: Path, tmp_path: Path) -> None:
    run(CHECKOUT.uv, "pip", "install", "--python", python, wheel("operator"))
    assert {"colocated-rl", *OF_PYDANTIC} == libraries(python)
    modules = sorted(path.stem for path in (CHECKOUT.root / "operator/colocated_rl_api").glob("[a-z]*.py"))
    imports = "; ".join(f"import colocated_rl_api.{module}" for module in modules)
    assert "imported" == run(python, "-c", f"{imports}; print('imported')", cwd=tmp_path)


def test_persons_own_trainer_needs_only_the_helper(python: Path, tmp_path: Path) -> None:
    run(CHECKOUT.uv, "pip", "install", "--python", python, wheel("operator"), wheel("workloads-trainer"))
    assert {"colocated-rl", "colocated-rl-trainer", "xxhash", *OF_PYDANTIC} == libraries(python)
    imports = "import colocated_rl_trainer.protocol.rank_server, colocated_rl_trainer.conformance.checks"
    assert "imported" == run(python, "-c", f"{imports}; print('imported')", cwd=tmp_path)


def test_command_line_is_installed_without_torch_or_the_operators_libraries(python: Path, tmp_path: Path) -> None:
    run(CHECKOUT.uv, "pip", "install", "--python", python, wheel("operator"), wheel("operator-cli"))
    assert set() == libraries(python) & {"torch", "numpy", "kopf", "kubernetes", "cryptography", "colocated-rl-member"}
    for program in ("colocated-rl", "kubectl-crlj"):
        assert "fine: minimal" in run(
            python.with_name(program), "validate", CHECKOUT.root / "crds/examples/minimal.yaml", cwd=tmp_path
        )
    assert "validate" in run(python.with_name("kubectl_complete-crlj"), "v", cwd=tmp_path).splitlines()


def test_command_line_is_installed_from_a_checkout_as_its_page_says(python: Path, tmp_path: Path) -> None:
    """It is installed from a copy, because a build leaves files beside the sources."""
    [command] = [command for block in blocks("docs/cli.md") if block.is_command for command in block.commands]
    pip, install, *folders = command.split()
    assert ("pip", "install") == (pip, install)
    ignored = shutil.ignore_patterns("*.egg-info", "build", "__pycache__", ".*")
    shutil.copytree(CHECKOUT.root / "operator", tmp_path / "operator", ignore=ignored)
    run(CHECKOUT.uv, "pip", install, "--python", python, *folders, cwd=tmp_path)
    example = CHECKOUT.root / "crds/examples/minimal.yaml"
    assert "fine: minimal" in run(python.with_name("kubectl-crlj"), "validate", example, cwd=tmp_path)


def test_all_wheels_are_of_one_version() -> None:
    version = (CHECKOUT.root / "operator/VERSION").read_text().strip()
    wheels = {path.name.split("-")[0]: path.name.split("-")[1] for path in CHECKOUT.wheels.glob("[ow]*/*/*.whl")}
    distributions = (
        "colocated_rl",
        *(f"colocated_rl_{part}" for part in ("cli", "member", "agent", "rollout", "trainer")),
    )
    assert dict.fromkeys(distributions, version) == wheels


@pytest.mark.parametrize("parts", [("workloads-agent",), ("workloads-rollout",)], ids=lambda parts: parts[0])
def test_members_are_installed_with_what_they_ask_for(python: Path, tmp_path: Path, parts: tuple[str, ...]) -> None:
    ours = [wheel(folder) for folder in ("operator", "workloads-member", *parts)]
    pins = CHECKOUT.root / "tests/requirements.txt"
    run(CHECKOUT.uv, "pip", "install", "--python", python, "--constraints", pins, *ours)
    module = f"colocated_rl_{parts[0].removeprefix('workloads-')}.__main__"
    assert "imported" == run(python, "-c", f"import {module}; print('imported')", cwd=tmp_path)


@pytest.mark.parametrize(
    "folder", ["operator", "operator-cli", "workloads-member", "workloads-agent", "workloads-rollout"]
)
def test_wheels_hold_our_packages_and_nothing_that_hides_the_standard_library(folder: str) -> None:
    with zipfile.ZipFile(wheel(folder)) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
    packages = {top for top in tops if not top.endswith(".dist-info")}
    assert packages
    assert [] == sorted(package for package in packages if not package.startswith("colocated_rl_"))


@pytest.mark.parametrize(
    ("image", "without"),
    [
        ("operator", {"torch", "transformers", "numpy", "sglang"}),
        ("agent", {"torch", "transformers", "numpy", "sglang", "kopf"}),
        ("rollout", {"torch", "sglang", "kopf"}),
        ("gpu", {"kopf", "colocated-rl-agent", "colocated-rl-rollout", "sglang-kernel"}),
    ],
)
def test_images_hold_only_what_their_part_needs(image: str, without: set[str]) -> None:
    assert set() == without & libraries(CHECKOUT.python(image))


def test_images_start_what_they_name(tmp_path: Path) -> None:
    for name, image in json.loads(CHECKOUT.images.read_text())["images"].items():
        inside, *module = image["entrypoint"]
        environment = CHECKOUT.environment(name.removeprefix("colocated-rl/").removesuffix(":dev"))
        python = environment / Path(inside).relative_to(IMAGE_ROOT)
        if module:
            found = f"import importlib.util; print(importlib.util.find_spec({module[1]!r} + '.__main__') is not None)"
            assert (name, "True") == (name, run(python, "-c", found, cwd=tmp_path))
        assert os.access(python, os.X_OK)


def test_kernel_that_only_a_gpu_has_says_so_when_it_is_called() -> None:
    calls = "from sgl_kernel.moe import fused; fused()"
    answer = subprocess.run(
        [CHECKOUT.python("gpu"), "-c", calls], capture_output=True, text=True, timeout=INSTALL_S, check=False
    )
    assert "NotImplementedError: sgl_kernel.moe.fused was called" in answer.stderr
