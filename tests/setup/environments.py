"""The virtual environments in `.build/env`: one for each image of the product, and one for checks and tests.

An image's environment holds real wheels of our packages, so that what a test starts is what a user installs. The
developers' environment has the same packages editable, and everything that any of them needs.
"""

import functools
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from setup.digest import digest, forget, is_made_from, remember, sources
from setup.layout import Layout
from setup.session import SetupError, SetupSession
from setup.tasks import SetupTask
from setup.toolchain import TOOLS, UV, clean_environment

DEV = "dev"
PEERS = "peers"
FRAMEWORKS = "frameworks"
WHEELS = "wheels"


@dataclass(frozen=True)
class ImageEnvironment:
    """An Environment holds what an image has. Paths are relative to the checkout."""

    name: str
    requirements: tuple[str, ...]  # complete: nothing else is resolved or installed
    packages: tuple[str, ...]  # our own, by folder
    expected_s: float


IMAGES = (
    ImageEnvironment("operator", ("operator/requirements.txt",), ("operator",), 3),
    ImageEnvironment(
        "agent", ("workloads/agent/requirements.txt",), ("operator", "workloads/member", "workloads/agent"), 3
    ),
    ImageEnvironment(
        "rollout", ("workloads/rollout/requirements.txt",), ("operator", "workloads/member", "workloads/rollout"), 10
    ),
    ImageEnvironment(
        "gpu",
        ("workloads/gpu/requirements.txt", "workloads/gpu/engine.txt"),
        ("operator", "workloads/trainer", "tests/engine_cpu"),
        40,
    ),
)
BESIDE = (
    (
        ImageEnvironment(PEERS, ("tests/peers/requirements.txt",), (), 30),
        "installing what the trainer is compared with",
    ),
    (
        ImageEnvironment(FRAMEWORKS, ("tests/frameworks/requirements.txt",), (), 15),
        "installing what plays against the gateway",
    ),
)
TYPED = (  # what our code imports; one that is missing here is read when types are checked
    "aiohttp.test_utils", "cryptography.x509", "httptools", "httpx", "huggingface_hub", "hypothesis.stateful",
    "jinja2.sandbox", "jsonschema", "kopf", "numpy.typing", "openai", "openapi_spec_validator",
    "packaging.requirements", "prometheus_client", "pydantic", "pytest_asyncio", "referencing.jsonschema",
    "rich.live", "rich.progress_bar", "safetensors.torch", "tokenizers",
    "torch.distributed.checkpoint.format_utils", "torch.distributed.fsdp", "torch.distributed.tensor",
    "torch.utils.tensorboard", "transformers", "uvloop", "xxhash", "yaml", "yarl",
)  # fmt: skip
OURS = ("operator", "operator/cli", "workloads/member", "workloads/agent", "workloads/rollout", "workloads/trainer")


def tasks(layout: Layout) -> Iterator[SetupTask]:
    yield SetupTask(
        name=DEV,
        doing="downloading and installing all libraries, torch among them",
        needs=(TOOLS,),
        is_made=lambda: is_made_from(layout.environment(DEV), _dev_inputs(layout)),
        make=lambda session: _make_dev(layout, session),
        expected_s=60,
    )
    yield SetupTask(
        name=WHEELS,
        doing="building our packages",
        needs=(DEV,),  # has the pinned setuptools
        is_made=lambda: all(_wheel_folder(layout, folder).is_dir() for folder in _packages()),
        make=lambda session: _make_wheels(layout, session),
        expected_s=5,
    )
    for environment, doing in BESIDE:
        yield _libraries_task(layout, environment, doing)
    for environment in IMAGES:
        yield _image_task(layout, environment)


def _libraries_task(layout: Layout, environment: ImageEnvironment, doing: str) -> SetupTask:
    path = layout.environment(environment.name)
    return SetupTask(
        name=environment.name,
        doing=doing,
        needs=(DEV,),  # has nearly all of it downloaded
        is_made=lambda: is_made_from(path, _library_inputs(layout, environment)),
        make=lambda session: _make_libraries(layout, session, environment),
        expected_s=environment.expected_s,
    )


def _image_task(layout: Layout, environment: ImageEnvironment) -> SetupTask:
    path = layout.environment(environment.name)
    return SetupTask(
        name=environment.name,
        doing="installing the image's environment",
        needs=(WHEELS,),
        is_made=lambda: is_made_from(path, _image_inputs(layout, environment)),
        make=lambda session: _make_image(layout, session, environment),
        expected_s=environment.expected_s,
    )


def _make_dev(layout: Layout, session: SetupSession) -> None:
    inputs = _dev_inputs(layout)
    path = _begin(layout, session, DEV)
    _uv(layout, session, DEV, "pip", "sync", "--python", path, "tests/requirements.txt")
    editable = [word for folder in OURS for word in ("--editable", folder)]
    # `compat` writes plain path entries, which type checkers follow too
    options = ("--no-deps", "--no-build-isolation", "--config-settings", "editable_mode=compat")
    _uv(layout, session, DEV, "pip", "install", "--python", path, *options, *editable)
    _learn_types(layout, session)
    remember(path, inputs)


def _learn_types(layout: Layout, session: SetupSession) -> None:
    """Let the type checker read the libraries, which takes longer than all that is ours. What it finds nobody asks."""
    words = ("--config-file", "tests/pyproject.toml", "-c", "\n".join(f"import {name}" for name in TYPED))
    with suppress(SetupError):
        session.run(DEV, [layout.environment(DEV) / "bin/mypy", *words], cwd=layout.root, env=clean_environment())


def _make_libraries(layout: Layout, session: SetupSession, environment: ImageEnvironment) -> None:
    path = _begin(layout, session, environment.name)
    _uv(layout, session, environment.name, "pip", "sync", "--python", path, *environment.requirements)
    remember(path, _library_inputs(layout, environment))


def _make_image(layout: Layout, session: SetupSession, environment: ImageEnvironment) -> None:
    inputs = _image_inputs(layout, environment)
    path = _begin(layout, session, environment.name)
    ours = path.with_name(f".{environment.name}.wheels.txt")
    wheels = [next(_wheel_folder(layout, folder).glob("*.whl")) for folder in environment.packages]
    ours.write_text("".join(f"{wheel.name.split('-')[0]} @ {wheel.as_uri()}\n" for wheel in wheels))
    # bytecode now: an image is read-only when it runs, and an engine imports some ten thousand files at every start
    options = ("--compile-bytecode", "--python", path)
    if not is_made_from(path / "lib", _library_inputs(layout, environment)):
        _uv(layout, session, environment.name, "pip", "sync", *options, *environment.requirements)
        remember(path / "lib", _library_inputs(layout, environment))
    _uv(layout, session, environment.name, "pip", "install", *options, "--no-deps", "--requirements", ours)
    remember(path, inputs)


def _begin(layout: Layout, session: SetupSession, name: str) -> Path:
    """An environment of this Python, perhaps with something in it already, that counts as unfinished."""
    path = layout.environment(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    forget(path)
    home = f"home = {sys.base_prefix}/bin"
    configuration = path / "pyvenv.cfg"
    if not configuration.exists() or home not in configuration.read_text().splitlines():
        _uv(layout, session, name, "venv", "--clear", "--python", sys.executable, path)
    return path


def _make_wheels(layout: Layout, session: SetupSession) -> None:
    """A wheel per package, in a folder named after its sources, so that another content is another address for uv."""
    for folder in _packages():
        place = _wheel_folder(layout, folder)
        if place.is_dir():
            continue
        for outdated in place.parent.glob("*"):
            shutil.rmtree(outdated)
        place.parent.mkdir(parents=True, exist_ok=True)
        # built in a copy: setuptools leaves a folder `build` behind, and would put removed modules from it into a wheel
        with tempfile.TemporaryDirectory(dir=place.parent, prefix=".") as scratch:
            copy, made = Path(scratch, "source"), Path(scratch, "wheel")
            shutil.copytree(layout.root / folder, copy, ignore=shutil.ignore_patterns("*.egg-info", "build", ".*"))
            _uv(
                layout, session, WHEELS,
                "build", "--wheel", "--no-build-isolation", "--python", layout.python(DEV), "--out-dir", made, copy,
            )  # fmt: skip
            made.rename(place)


def _uv(layout: Layout, session: SetupSession, log: str, *words: str | Path) -> None:
    session.run(log, [layout.uv, *words], cwd=layout.root, env=clean_environment())


def _packages() -> list[str]:
    """Return the packages that become wheels: all but the kernels that only a GPU has are ours."""
    return sorted({*OURS, *(folder for environment in IMAGES for folder in environment.packages)})


@functools.cache  # one answer a run: a file saved meanwhile belongs to the next
def _wheel_folder(layout: Layout, folder: str) -> Path:
    return layout.wheels / folder.replace("/", "-") / digest(files=sources(layout.root / folder))


def _image_inputs(layout: Layout, environment: ImageEnvironment) -> str:
    wheels = (str(_wheel_folder(layout, folder)) for folder in environment.packages)
    return digest(words=[_library_inputs(layout, environment), *wheels])


def _library_inputs(layout: Layout, environment: ImageEnvironment) -> str:
    files = (layout.root / path for path in environment.requirements)
    return digest(files=files, words=[UV, str(layout.build), sys.base_prefix, sys.version])


def _dev_inputs(layout: Layout) -> str:
    described = [layout.root / folder / name for folder in OURS for name in ("pyproject.toml", "VERSION")]
    files = [layout.root / "tests/requirements.txt", *described]
    return digest(files=files, words=[UV, str(layout.build), sys.base_prefix, sys.version])
