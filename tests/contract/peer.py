"""Libraries that results are compared with run in an environment of their own, each by a script in `tests/peers`."""

from __future__ import annotations

import subprocess
from pathlib import Path

from setup.environments import PEERS
from setup.layout import CHECKOUT
from setup.toolchain import clean_environment

PEER_S = 300.0


def run_peer(script: str, folder: Path, **variables: str) -> str:
    """Run a script of `tests/peers` on a folder, with further environment variables, and return what it prints."""
    answer = subprocess.run(
        [CHECKOUT.python(PEERS), CHECKOUT.root / "tests/peers" / script, folder],
        cwd=folder,
        env=clean_environment() | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HOME": str(folder)} | variables,
        capture_output=True,
        text=True,
        timeout=PEER_S,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    return answer.stdout
