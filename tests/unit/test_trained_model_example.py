"""The example that trains a public model: what its job leaves to defaults, and that its trainer takes its options."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from colocated_rl_api.job import ColocatedRLJob, Verify
from colocated_rl_trainer.protocol.settings import TrainerConfig
from examples.trained_model.demo import HERE, LESSON, MODEL
from setup.layout import CHECKOUT

JOB = ColocatedRLJob.read(yaml.safe_load((HERE / "job.yaml").read_text()))


def test_job_has_the_usual_check_of_new_weights_and_evaluates_at_its_ends() -> None:
    assert Verify.WEIGHTS is JOB.spec.weight_sync.verify
    assert JOB.spec.evaluation is not None
    assert 0 == JOB.spec.steps % JOB.spec.evaluation.every_steps
    assert LESSON.questions_at_least <= JOB.spec.evaluation.sets[0].samples


def test_trainer_takes_the_jobs_options(tmp_path: Path) -> None:
    options = tmp_path / "config.json"
    options.write_text(json.dumps(JOB.spec.trainer.config))
    assert TrainerConfig.read(options).learning_rate == JOB.spec.trainer.config["learningRate"]


def test_model_is_the_one_that_the_set_up_makes() -> None:
    assert CHECKOUT.trained_model == MODEL
