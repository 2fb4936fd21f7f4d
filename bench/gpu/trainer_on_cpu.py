"""The default trainer on a CPU, which writes down what it would hold of the stand-in for a device (`fakes.device`)."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from colocated_rl_trainer.grpo.loop import GRPOTrainer
from colocated_rl_trainer.protocol.rank_server import serve
from colocated_rl_trainer.protocol.settings import RankSettings, TrainerConfig


class TrainerOfNoDevice(GRPOTrainer):
    """Trains as the default trainer, on the CPU whatever its device is."""

    def __init__(self, settings: RankSettings) -> None:
        super().__init__(replace(settings, device="cpu"), TrainerConfig.read(settings.config))
        self._held = Path(os.environ["FAKE_DEVICE"]) / str(os.getpid())

    def onload(self) -> None:
        super().onload()
        self._held.write_text(str(self._state.size_bytes))

    def offload(self) -> None:
        super().offload()
        self._held.write_text("0")


if __name__ == "__main__":
    serve(TrainerOfNoDevice)
