"""Real trainers that would end again until the job's settings change, as an agent hears them."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from colocated_rl_agent.drivers.base import NotRetriable, OutcomeUnknown
from colocated_rl_agent.drivers.trainer import TrainerRank
from colocated_rl_trainer.conformance.ranks import TrainerGroup, TrainerKind, TrainerProcess
from colocated_rl_trainer.conformance.shards import Example, write_shards
from fakes.tiny_model import write_tiny_model

DEADLINE_S = 300.0  # torch and the model, ten seconds of a processor that others may share
HUGE = 1e30  # its square is no float32


@pytest.fixture(scope="module")
def kind(tmp_path_factory: pytest.TempPathFactory) -> TrainerKind:
    model = write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")
    return TrainerKind("grpo", [sys.executable, "-m", "colocated_rl_trainer"], model, {"advantage": "Mean"})


@contextlib.asynccontextmanager
async def calling(rank: TrainerProcess) -> AsyncIterator[TrainerRank]:
    """Give what an agent calls the rank by."""
    client = TrainerRank(rank.socket, progress_s=DEADLINE_S)
    try:
        yield client
    finally:
        await client.close()


def test_an_agent_hears_from_every_rank_that_a_gradient_which_is_not_finite_would_come_again(
    kind: TrainerKind, tmp_path: Path
) -> None:
    samples = [Example([1, 2], [3, 4, 5], [-3.0] * 3, HUGE * (number % 2), number // 4) for number in range(8)]
    with TrainerGroup(kind, tmp_path, size=2) as two:
        two.wait_loaded()
        two.onload()
        shards = write_shards(tmp_path, samples, step=1, split=[number // 4 for number in range(len(samples))])

        async def train(rank: TrainerProcess, shard: Path) -> None:
            async with calling(rank) as client:
                await client.train(1, shard)

        async def train_all() -> list[BaseException | None]:
            return await asyncio.gather(*map(train, two.ranks, shards), return_exceptions=True)

        told = asyncio.run(train_all())
        assert [NotRetriable] * 2 == [type(error) for error in told]
        assert "gradient norm of step 1 is" in str(told[0])
        assert "lower learningRate or importanceCap in spec.trainer.config, or set nonFiniteGradient" in str(told[0])
        assert [1, 1] == [rank.process.wait(DEADLINE_S) for rank in two.ranks]


def test_an_agent_hears_which_option_a_trainer_rejects(kind: TrainerKind, tmp_path: Path) -> None:
    with TrainerGroup(replace(kind, config={"learningrate": 1e-3}), tmp_path, size=1) as group:
        [rank] = group.ranks

        async def look() -> str:
            async with calling(rank) as client:
                while True:
                    try:
                        await client.status()
                    except OutcomeUnknown:
                        assert rank.process.poll() is None, "it has ended unheard"
                    except NotRetriable as error:
                        return str(error)
                    await asyncio.sleep(0.01)

        told = asyncio.run(asyncio.wait_for(look(), DEADLINE_S))
        assert told.startswith("unknown key learningrate in spec.trainer.config, did you mean learningRate?")
        assert 2 == rank.process.wait(DEADLINE_S)
