"""Pins what every environment holds: `make lock`.

One resolution of everything together, into `tests/requirements.txt`; each part's file is a selection from it, so that
no library has two versions in the project. What only tests compare with is beside it, under the same pins; what asks
for other versions, and runs in processes of its own, is resolved alone. Pins that satisfy what is asked stay: to move
one, remove its line first.
No file names an index: whoever installs decides where packages come from. Each pin has the hashes of its project's
files, so that they are those wherever they come from. `workloads/gpu/engine.txt` and
`tests/trained_model/requirements.txt`, of one pin each, are written by hand.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from setup.layout import Layout
from setup.session import SetupSession
from setup.toolchain import GO, GO_PINS, UV, UV_PINS, clean_environment

PYTHON = "3.11"  # the oldest supported
ALL = "tests/requirements.txt"
ASKED = ("tests/requirements.in", "workloads/gpu/requirements.in")
PARTS = ("operator", "operator/cli", "workloads/member", "workloads/agent", "workloads/rollout", "workloads/trainer")
SELECTIONS = {
    "tests/audit/requirements.txt": ("tests/audit/requirements.in",),
    "operator/requirements.txt": ("operator/pyproject.toml",),
    "workloads/agent/requirements.txt": ("workloads/agent/pyproject.toml",),
    "workloads/rollout/requirements.txt": ("workloads/rollout/pyproject.toml",),
    "tests/page/requirements.txt": ("tests/page/requirements.in",),
    "tests/peers/requirements.txt": ("tests/peers/requirements.in",),
    "tests/mutants/requirements.txt": ("tests/mutants/requirements.in",),
    "tests/website/requirements.txt": ("tests/website/requirements.in",),
    "workloads/gpu/requirements.txt": ("workloads/gpu/requirements.in", "workloads/trainer/pyproject.toml"),
}
ALONE = {
    "tests/frameworks/requirements.txt": ("tests/frameworks/requirements.in",),
    "tests/fuzz/requirements.txt": ("tests/fuzz/requirements.in",),
    "tests/release/requirements.txt": ("tests/release/requirements.in",),
}

# what the vendor's image of the engine brings: a list to compare with, that nothing here installs
VENDOR = "workloads/gpu/vendor.txt"
OF_VENDOR = ("--python-platform", "x86_64-manylinux_2_35", "--python-version", "3.12", "--prerelease", "allow")


def resolve(layout: Layout, session: SetupSession) -> None:
    session.say("resolving all requirement files, about 30 s")
    _compile(layout, session, [*ASKED, *(f"{part}/pyproject.toml" for part in PARTS)], into=ALL)
    for into, asked in SELECTIONS.items():
        _compile(layout, session, [*asked, "--constraints", ALL], into=into)
    for into, asked in ALONE.items():
        _compile(layout, session, asked, into=into)
    with tempfile.TemporaryDirectory() as folder:  # what makes environments, of images too, and Go
        for into, wanted in ((UV_PINS, f"{UV}\nsetuptools\n"), (GO_PINS, f"{GO}\n")):
            tools = Path(folder, "tools.in")
            tools.write_text(wanted)
            _compile(layout, session, [str(tools), "--constraints", ALL], into=into)
    words = (*OF_VENDOR, "--no-header", "--no-annotate", "workloads/gpu/engine.txt", "--output-file", VENDOR)
    session.run("lock", [layout.uv, "pip", "compile", "--quiet", *words], cwd=layout.root, env=clean_environment())


def _compile(layout: Layout, session: SetupSession, words: Sequence[str], *, into: str) -> None:
    session.run(
        "lock",
        [
            *(layout.uv, "pip", "compile", "--quiet", "--universal", "--python-version", PYTHON, "--generate-hashes"),
            *(["--all-extras"] if any(word.endswith("pyproject.toml") for word in words) else []),
            *(
                "--no-header",
                "--no-annotate",
                "--no-emit-package=colocated-rl",
                "--no-emit-package=colocated-rl-member",
                "--no-emit-package=pycosat",  # has no wheel; `colocated_rl_rollout.tasks.gym` does without
            ),
            *(*words, "--output-file", into),
        ],
        cwd=layout.root,
        env=clean_environment(),
    )
