"""The small model that the demo and the end-to-end tests train. How it is made is the example's own affair."""

from pathlib import Path

from setup.digest import digest, is_made_from, remember
from setup.environments import DEV
from setup.layout import Layout
from setup.localcluster import BINARY
from setup.session import SetupSession
from setup.tasks import SetupTask
from setup.toolchain import clean_environment

MODEL = "model"
MADE_BY = ("model.py", "sampling.py", "task.py")


def task(layout: Layout) -> SetupTask:
    def inputs() -> str:
        made_by = [layout.root / "examples/arithmetic" / name for name in MADE_BY]
        return digest(files=[*made_by, layout.root / "tests/requirements.txt"])

    def make(session: SetupSession) -> None:
        made_from = inputs()
        command: list[str | Path] = [layout.python(DEV), "-m", "examples.arithmetic.model", layout.model]
        session.run(MODEL, command, cwd=layout.root, env=clean_environment())
        remember(layout.model, made_from)

    return SetupTask(
        name=MODEL,
        doing="teaching the demo's small model its first sums",
        needs=(DEV, BINARY),  # takes all cores, and so does the binary: one after the other
        is_made=lambda: is_made_from(layout.model, inputs()),
        make=make,
        expected_s=120,
    )
