"""The operator and the command line derive the same seats of a job from mode, placement and sizes."""

from __future__ import annotations

import pytest
import yaml

from colocated_rl_api.job import ColocatedRLJobSpec
from colocated_rl_api.rungs import Placement
from colocated_rl_api.seats import ROLLOUT_SEAT, Seats, gpu_seat, role_of, seats_for
from scenarios.corpus import GOOD

TOGETHER = ("gpu-0", "gpu-1")
TRAINERS, ENGINES = ("trainer-0", "trainer-1"), ("engine-0", "engine-1", "engine-2")


@pytest.mark.parametrize(
    ("mode", "placement", "seats", "gpu"),
    [
        ("Full", "WithTrainer", Seats(TOGETHER, TOGETHER), TOGETHER),
        ("RolloutOnly", "WithTrainer", Seats(TOGETHER, TOGETHER), TOGETHER),
        ("TrainOnly", "WithTrainer", Seats(TOGETHER, TOGETHER), TOGETHER),
        ("Full", "OwnDevices", Seats(TRAINERS, ENGINES), TRAINERS + ENGINES),
        ("RolloutOnly", "OwnDevices", Seats((), ENGINES), ENGINES),
        ("TrainOnly", "OwnDevices", Seats(TRAINERS, ()), TRAINERS),
        ("Full", "Both", Seats(TOGETHER, TOGETHER + ENGINES), TOGETHER + ENGINES),
        ("RolloutOnly", "Both", Seats(TOGETHER, TOGETHER + ENGINES), TOGETHER + ENGINES),
        ("TrainOnly", "Both", Seats(TOGETHER, TOGETHER), TOGETHER),
        ("OfANewerVersion", "OwnDevices", Seats(TRAINERS, ENGINES), TRAINERS + ENGINES),
        ("Full", "OfANewerVersion", Seats(TOGETHER, TOGETHER + ENGINES), TOGETHER + ENGINES),
    ],
)
def test_seats_follow_from_mode_placement_replicas_and_engines(
    mode: str, placement: str, seats: Seats, gpu: tuple[str, ...]
) -> None:
    found = seats_for(mode, placement, replicas=2, engines=0 if placement == "WithTrainer" else 3)
    assert (seats, gpu) == (found, found.gpu)


@pytest.mark.parametrize("placement", ["WithTrainer", "OwnDevices", "Both"])
@pytest.mark.parametrize(("mode", "references"), [("Full", 2), ("RolloutOnly", 2), ("TrainOnly", 0)])
def test_a_reference_of_its_own_has_seats_where_samples_are_made(mode: str, references: int, placement: str) -> None:
    found = seats_for(mode, placement, replicas=2, engines=1, references=2)
    plain = seats_for(mode, placement, replicas=2, engines=1)
    assert ("reference-0", "reference-1")[:references] == found.references
    assert (plain.gpu, (*plain.gpu, *found.references, ROLLOUT_SEAT)) == (found.gpu, found.all)


def test_a_seat_tells_its_role() -> None:
    assert ["gpu", "engine", "rollout"] == [
        role_of(seat) for seat in (gpu_seat(3), gpu_seat(12, "engine"), ROLLOUT_SEAT)
    ]


def test_f56_a_job_that_says_nothing_of_placement_shares_each_device_and_offloads_all_that_can_be() -> None:
    manifest = yaml.safe_load(GOOD["minimal"].text)
    job = ColocatedRLJobSpec.model_validate(manifest["spec"] | {"reference": {}})
    assert Placement.TIME_SLICED is job.placement
    spec = job.model_dump(mode="json", by_alias=True)
    assert ("Full", 1, 1, "nvidia.com/gpu") == (
        spec["mode"], spec["replicas"], spec["gpus"]["count"], spec["gpus"]["resourceName"],
    )  # fmt: skip
    assert ("WithTrainer", None) == (spec["rollout"]["placement"], spec["rollout"].get("replicas"))
    assert ["Weights", "KVCache", "CUDAGraph"] == spec["rollout"]["offload"]
    assert ["Parameters", "Gradients", "Optimizer"] == spec["trainer"]["offload"]
    assert "WithTrainer" == spec["reference"]["placement"]
