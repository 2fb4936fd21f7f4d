"""A shell as the tutorial leaves it: kubectl, Helm and `kubectl crlj` are on its PATH. Commands of pages run in it."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from setup.layout import CHECKOUT

COMMAND_S = 1500.0  # beyond the deadlines that pages write


@dataclass(frozen=True)
class RecordedTerminal:
    folder: Path
    environment: dict[str, str]

    @classmethod
    def opened(cls, folder: Path, kubeconfig: Path, *, is_local: bool = True) -> Self:
        """Open a terminal in an empty folder. is_local: kubectl and Helm are those of the
        local cluster, else the machine's.
        """
        if is_local:
            for name in ("kubectl", "helm"):
                (folder / name).symlink_to(CHECKOUT.localcluster)
        search = os.pathsep.join([str(folder), str(CHECKOUT.python("dev").parent), os.environ["PATH"]])
        return cls(folder, {**os.environ, "PATH": search, "KUBECONFIG": str(kubeconfig), "HOME": str(folder)})

    def __call__(self, command: str, *, at: Path | None = None, **names: str) -> str:
        """Return the printed output. names: replacements for words of the page. Raises
        AssertionError when the command fails.
        """
        for word, name in names.items():
            command = re.sub(rf"\b{word}\b", name, command)
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=at or self.folder, env=self.environment,
            capture_output=True, text=True, timeout=COMMAND_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout
