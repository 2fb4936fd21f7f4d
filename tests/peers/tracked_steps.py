"""Tells trackers of some steps, with a restart between them: `python tracked_steps.py FOLDER`, in environment `peers`.

Prints what TensorBoard's own reader finds afterwards, as JSON: step and value of each figure.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from colocated_rl_trainer.grpo.trackers import TENSORBOARD_FOLDER, check_trackers, make_trackers
from colocated_rl_trainer.protocol.settings import RankSettings, TrainerConfig


def main(folder: Path) -> None:
    config = TrainerConfig.read(folder / "trainer.json")
    check_trackers(config.trackers)
    settings = RankSettings(
        socket=folder / "unused.sock", config=folder / "trainer.json", job=folder / "job.json", model=folder,
        checkpoints=folder / "checkpoints", lineage=1, rank=0, world_size=1, local_rank=0,
        master_address="127.0.0.1", master_port=1, device="cpu",
    )  # fmt: skip
    for begin, end, loss in ((0, 3, 1.0), (2, 4, 2.0)):  # the third step is done again
        trackers = make_trackers(settings, config, step=begin)
        for step in range(begin + 1, end + 1):
            for tracker in trackers:
                tracker.write(step, {"loss": loss * step})
    events = EventAccumulator(str(folder / "checkpoints" / TENSORBOARD_FOLDER))
    events.Reload()
    values = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    sys.stdout.write(json.dumps(values) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
