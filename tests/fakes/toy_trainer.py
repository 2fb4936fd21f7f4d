"""The smallest loop there is: eight numbers that each step changes. Shows the rank server without torch.

Speaks to no peers; a batch is a shard's bytes. `python tests/fakes/toy_trainer.py`, with a trainer's environment.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

from colocated_rl_api.weights import Probe
from colocated_rl_trainer.protocol.rank import Refused, Watch
from colocated_rl_trainer.protocol.rank_server import serve
from colocated_rl_trainer.protocol.settings import RankSettings


class ToyLoop:
    def __init__(self, settings: RankSettings) -> None:
        self._settings = settings
        self._numbers = [0.0] * 8

    def load(self) -> int:
        saved = self._saved()
        if not saved:
            return 0
        kept = json.loads(saved[-1].read_bytes())
        self._numbers = kept["numbers"]
        return int(kept["step"])

    def onload(self) -> None: ...

    def offload(self) -> None: ...

    def train(self, step: int, shard: Path, watch: Watch) -> Mapping[str, float]:
        try:
            content = shard.read_bytes()
            size = struct.unpack("<Q", content[:8])[0]
            header = json.loads(content[8 : 8 + size])
        except (OSError, ValueError, struct.error) as error:
            raise Refused(f"{shard} is no shard: {error}") from error
        watch.progress()
        watch.mark_dirty()
        self._numbers = [number + step for number in self._numbers]
        return {"columns": float(len(header))}

    def export(self, directory: Path) -> Probe | None:
        if self._settings.writes_weights:
            data = struct.pack("<8f", *self._numbers)
            head = json.dumps({"numbers": {"dtype": "F32", "shape": [8], "data_offsets": [0, len(data)]}}).encode()
            (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + data)
        return None

    def save(self, step: int, keep: int) -> None:
        target = self._settings.checkpoints / f"{step:08d}-{self._settings.rank}.toy"
        draft = target.with_suffix(".draft")
        draft.write_text(json.dumps({"step": step, "numbers": self._numbers}))
        draft.replace(target)
        for old in self._saved()[:-keep]:
            old.unlink()

    def replay_from(self) -> int:
        """It reads the newest or fails."""
        return max((int(path.name[:8]) for path in self._saved()), default=0)

    def _saved(self) -> list[Path]:
        return sorted(self._settings.checkpoints.glob(f"*-{self._settings.rank}.toy"))


if __name__ == "__main__":
    serve(ToyLoop)
