"""These tests show the settings of the process, and how it refuses those that it can't be started with."""

from __future__ import annotations

from pathlib import Path

import pytest

from colocated_rl_api import names
from colocated_rl_member.settings import SettingsError
from colocated_rl_rollout.rules.chat import Chat, ModelUnusable
from colocated_rl_rollout.sealer import trainer_ranks
from colocated_rl_rollout.settings import read_settings
from colocated_rl_rollout.tasks.task_process import memory_bytes
from fakes.rollout import JobOnDisk, make_spec, write_model

ENVIRONMENT = {names.ENV_POD_NAME: "job-rollout-0-0", names.ENV_POD_UID: "uid"}


def test_a_pod_needs_no_arguments_beside_its_job_file(tmp_path: Path) -> None:
    job = JobOnDisk.write(tmp_path, make_spec())
    settings = read_settings(["--job-file", str(job.directory / "job.json")], ENVIRONMENT)
    assert (names.CONTROL_PORT, names.DATA_PORT) == (settings.ports.control, settings.ports.data)
    assert (Path(names.STATE_DIR), Path(names.MODEL_DIR)) == (settings.state, settings.model)


@pytest.mark.parametrize("missing", ENVIRONMENT)
def test_a_missing_variable_is_named(tmp_path: Path, missing: str) -> None:
    job = JobOnDisk.write(tmp_path, make_spec())
    left = {name: value for name, value in ENVIRONMENT.items() if name != missing}
    with pytest.raises(SettingsError, match=missing):
        read_settings(["--job-file", str(job.directory / "job.json")], left)


def test_a_job_file_that_is_absent_or_broken_is_named(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    with pytest.raises(SettingsError, match=str(path)):
        read_settings(["--job-file", str(path)], ENVIRONMENT)
    path.write_text('{"name": "job"}')
    with pytest.raises(SettingsError, match="namespace"):
        read_settings(["--job-file", str(path)], ENVIRONMENT)


def test_a_batch_has_a_shard_for_each_trainer_rank() -> None:
    spec = make_spec()
    gpus = spec.gpus.model_copy(update={"count": 4})
    assert 2 == trainer_ranks(spec), "one rank a replica without devices"
    assert 8 == trainer_ranks(spec.model_copy(update={"gpus": gpus}))


def test_prompts_are_rendered_by_the_models_template(tmp_path: Path) -> None:
    chat = Chat(write_model(tmp_path))
    ids = chat.prompt_ids("1 + 1 =")
    assert (1, 2) == (ids[0], ids[len("xuser\n1 + 1 =")])
    assert "user\n1 + 1 =\nassistant\n" == chat.text(ids)
    assert frozenset({2}) == chat.end_ids


@pytest.mark.parametrize("missing", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_model_that_lacks_a_part_is_refused_by_name(tmp_path: Path, missing: str) -> None:
    model = write_model(tmp_path)
    (model / missing).unlink()
    with pytest.raises(ModelUnusable, match=str(model)):
        Chat(model)


def test_end_tokens_come_from_every_file_that_names_them(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    (model / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    assert frozenset({0, 2}) == Chat(model).end_ids


@pytest.mark.parametrize(
    ("container_gib", "processes", "expected_gib"), [(None, 1, None), (8, 1, 8), (8, 4, 2), (1, 2, 1)]
)
def test_task_processes_share_the_memory_of_their_container(
    container_gib: int | None, processes: int, expected_gib: int | None
) -> None:
    given = None if container_gib is None else container_gib << 30
    expected = None if expected_gib is None else expected_gib << 30
    assert expected == memory_bytes(given, processes=processes)
