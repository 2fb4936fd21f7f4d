"""The local cluster's one binary, and the list of images it knows."""

import json
import sys
from pathlib import Path

from setup.digest import digest, is_made_from, remember, sources
from setup.environments import IMAGES
from setup.layout import Layout
from setup.session import SetupSession
from setup.tasks import SetupTask
from setup.toolchain import TOOLS, environment_of_go

BINARY = "cluster"
IMAGE_LIST = "images"

# of the machine's root, what no container sees
HIDDEN = ("/tmp", "/var/tmp", "/home", "/root", "/run")

# where a container has its environment, wherever the checkout lies: pods mount volumes over /tmp, for one
IMAGE_ROOT = "/opt/colocated-rl"

# what only the CPU build of the GPU image sets
ENGINE_ON_CPU = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",  # several engines and trainers share the cores, and threads that wait for one spin
    "OMP_WAIT_POLICY": "passive",
}


def binary_task(layout: Layout) -> SetupTask:
    folder = layout.root / "tests/localcluster"

    def inputs() -> str:
        return digest(files=sources(folder))

    def make(session: SetupSession) -> None:
        made_from = inputs()
        session.run(BINARY, ["bash", folder / "build.sh", layout.localcluster], env=environment_of_go(layout))
        remember(layout.localcluster, made_from)

    return SetupTask(
        name=BINARY,
        doing="building the Kubernetes control plane, node and Helm from source",
        needs=(TOOLS,),
        is_made=lambda: is_made_from(layout.localcluster, inputs()),
        make=make,
        expected_s=300,
    )


def images_task(layout: Layout) -> SetupTask:
    text = json.dumps({"images": image_list(layout)}, indent=2) + "\n"

    def make(_: SetupSession) -> None:
        part = layout.images.with_suffix(".part")
        part.write_text(text)
        part.rename(layout.images)

    return SetupTask(
        name=IMAGE_LIST,
        doing="listing the images",
        needs=tuple(environment.name for environment in IMAGES),
        is_made=lambda: layout.images.exists() and layout.images.read_text() == text,
        make=make,
    )


def image_list(layout: Layout) -> dict[str, dict[str, object]]:
    """Return, by image name, which environment its containers see, read-only on this
    machine's root, and what they start.
    """
    return {
        f"colocated-rl/{environment.name}:dev": {
            "root": "/",
            "hide": sorted({*HIDDEN, str(layout.root), str(Path.home())} - {"/"}),
            "binds": [f"{layout.environment(environment.name)}:{IMAGE_ROOT}:ro", *_base_python()],
            "env": {
                "PATH": f"{IMAGE_ROOT}/bin:/usr/local/bin:/usr/bin:/bin",
                "LANG": "C.UTF-8",
                "PYTHONUNBUFFERED": "1",
                "PYTHONDONTWRITEBYTECODE": "1",
                **(ENGINE_ON_CPU if environment.name == "gpu" else {}),
            },
            "entrypoint": _entrypoint(environment.name),
            "workingDir": "/",
            "user": "65532:65532",
        }
        for environment in IMAGES
    }


def _entrypoint(name: str) -> list[str]:
    python = f"{IMAGE_ROOT}/bin/python"
    return [python] if name == "gpu" else [python, "-m", f"colocated_rl_{name}"]


def _base_python() -> list[str]:
    """The Python that environments are made from, where that isn't the system's."""
    base = Path(sys.base_prefix)
    return [] if base == Path("/usr") else [f"{base}:{base}:ro"]
