"""Run one rank of the default trainer: `python3 -m colocated_rl_trainer`."""

import os

from colocated_rl_trainer.protocol.rank import Loop
from colocated_rl_trainer.protocol.rank_server import serve
from colocated_rl_trainer.protocol.settings import RankSettings, TrainerConfig


def _make_loop(settings: RankSettings) -> Loop:
    config = TrainerConfig.read(settings.config)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # its warnings are no JSON lines, and pods have no host names
    from colocated_rl_trainer.grpo.loop import GRPOTrainer

    return GRPOTrainer(settings, config)


if __name__ == "__main__":
    serve(_make_loop)
