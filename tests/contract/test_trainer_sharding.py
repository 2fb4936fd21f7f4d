"""A model that ranks share: each has its part, and together they do what each alone would do with the whole."""

from __future__ import annotations

import errno
import io
import os
import pickle
import re
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from allocations import resident_growth
from contract.trainer_in_process import RankInProcess
from contract.trainer_ranks_in_process import UnwatchedTrainer, in_ranks
from full_disk import no_file_above
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from traces import wait_until
from transformers import AutoModelForCausalLM, AutoTokenizer

from colocated_rl_api.rungs import WeightVersion
from colocated_rl_api.weights import Digest, finished_model
from colocated_rl_trainer.conformance.shards import Example, write_shards
from colocated_rl_trainer.protocol.finished import save_final_model
from colocated_rl_trainer.protocol.manifest import Exported, digests_of, tensor_entries, write_manifest
from colocated_rl_trainer.protocol.rank import Refused
from colocated_rl_trainer.state import export, tensor_file
from colocated_rl_trainer.state.export import Writers, write_index
from colocated_rl_trainer.state.group import GroupLost
from colocated_rl_trainer.state.sharding import (
    METADATA,
    CheckpointBroken,
    part_of,
    read_parts,
    shapes_in,
    whole,
    write_parts,
)
from fakes.tiny_model import write_tiny_model

Tensors = Mapping[str, torch.Tensor]

STATE = 4  # float32 of each parameter: itself, its gradient, two moments
FILE_BYTES = 4 << 20


def samples(step: int, count: int = 8) -> list[Example]:
    return [
        Example([1 + number, 2], [3 + number % 5, 4, 5 + step], [-3.0] * 3, float(number % 3), number // 4, step - 1)
        for number in range(count)
    ]


def train(trainer: UnwatchedTrainer, steps: int = 1, count: int = 8) -> None:
    folder = trainer._settings.checkpoints.parent
    for step in range(trainer.step + 1, trainer.step + steps + 1):
        ranks = trainer._settings.world_size
        mine = folder / f"rank-{trainer.rank}"
        mine.mkdir(exist_ok=True)
        trainer.train(step, write_shards(mine, samples(step, count), step=step, split=ranks)[trainer.rank], trainer)
    trainer.step += steps


def state_of(trainer: UnwatchedTrainer) -> dict[str, list[float]]:
    """All of it, whole."""
    return {name: whole(tensor).flatten().tolist() for name, tensor in trainer._state.saved().items()}


# ------------------------------------------------------------------------------------------------------ what each holds
def bytes_held(trainer: UnwatchedTrainer) -> tuple[int, int]:
    train(trainer)
    parts = [part_of(parameter) for parameter in trainer.model.parameters()]
    return trainer._state.size_bytes, sum(part.numel() for part in parts)


@pytest.mark.parametrize("ranks", [2, 3])
def test_each_rank_holds_its_part_of_the_state(tmp_path: Path, ranks: int) -> None:
    model = write_tiny_model(tmp_path / "model")
    size = sum(tensor.numel() for tensor in load_file(model / "model.safetensors").values())

    held = in_ranks(ranks, tmp_path, model, bytes_held)

    assert size == sum(parameters for _, parameters in held)
    for state_bytes, _ in held:
        assert state_bytes < 1.1 * STATE * 4 * size / ranks


def test_each_rank_has_everything_where_state_is_replicated(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    size = sum(tensor.numel() for tensor in load_file(model / "model.safetensors").values())

    assert [(STATE * 4 * size, size)] * 2 == in_ranks(2, tmp_path, model, bytes_held, trainingState="Replicated")


# --------------------------------------------------------------------------------------------------------------- steps
def train_one(trainer: UnwatchedTrainer) -> dict[str, list[float]]:
    train(trainer)
    return state_of(trainer)


@pytest.mark.parametrize("clip", [1e-3, 1e9], ids=["clipped", "as it is"])
def test_gradient_is_clipped_by_the_norm_of_all_its_parts(tmp_path: Path, clip: float) -> None:
    config: dict[str, object] = {"optimizer": "SGD", "learningRate": 1.0, "gradientClip": clip}
    model = write_tiny_model(tmp_path / "model")
    begin = load_file(model / "model.safetensors")
    (alone,), (shared, *_) = (in_ranks(ranks, tmp_path, model, train_one, **config) for ranks in (1, 2))

    moved = 0.0
    for name, tensor in begin.items():
        ours, theirs = (torch.tensor(state[f"parameters.{name}"]) - tensor.flatten() for state in (shared, alone))
        assert (ours - theirs).norm() < 1e-5 * max(float(theirs.norm()), 1e-3)
        moved += float(ours.square().sum())
    assert (moved**0.5 < 1.01e-3) == (clip < 1)


def train_two_samples(trainer: UnwatchedTrainer) -> dict[str, list[float]]:
    train(trainer, count=2)
    return state_of(trainer)


@pytest.mark.parametrize("state", ["Sharded", "Replicated"])
def test_batch_of_fewer_samples_than_ranks_is_trained_as_one_rank_trains_it(tmp_path: Path, state: str) -> None:
    """The last batch of a job may be as small: its one group is in one of two minibatches, and a rank has nothing."""
    config: dict[str, object] = {"optimizer": "SGD", "learningRate": 1.0, "minibatches": 2, "trainingState": state}
    model = write_tiny_model(tmp_path / "model")
    begin = load_file(model / "model.safetensors")
    (alone,), of_ranks = (in_ranks(ranks, tmp_path, model, train_two_samples, **config) for ranks in (1, 3))

    assert of_ranks[1:] == of_ranks[:-1]
    apart, moved = 0.0, 0.0
    for name, tensor in begin.items():
        ours, theirs = (torch.tensor(one[f"parameters.{name}"]) - tensor.flatten() for one in (of_ranks[0], alone))
        apart, moved = apart + float((ours - theirs).square().sum()), moved + float(theirs.square().sum())
    assert 0 < moved
    assert apart < 1e-10 * moved


def test_ranks_that_compute_in_bfloat16_keep_and_update_the_state_in_float32(tmp_path: Path) -> None:
    """The gradient is bfloat16's, up to its noise, and weights move by it in float32: less than bfloat16 can add."""
    config: dict[str, object] = {"optimizer": "SGD", "learningRate": 1e-3, "gradientClip": 1e9}
    model = write_tiny_model(tmp_path / "model")
    begin = load_file(model / "model.safetensors")
    (exact,) = in_ranks(1, tmp_path, model, train_one, dtype="float32", **config)
    (ours, other) = in_ranks(2, tmp_path, model, train_one, dtype="bfloat16", **config)

    assert ours == other
    apart, moved = 0.0, 0.0
    for name, tensor in begin.items():
        mine, theirs = (torch.tensor(state[f"parameters.{name}"]) - tensor.flatten() for state in (ours, exact))
        apart, moved = apart + float((mine - theirs).square().sum()), moved + float(theirs.square().sum())
    assert 1e-4 * moved**0.5 < apart**0.5 < 0.05 * moved**0.5


# -------------------------------------------------------------------------------------------------------------- exports
def export_in_small_files(trainer: UnwatchedTrainer) -> None:
    directory = trainer._settings.checkpoints.parent / f"export-{trainer.rank}"
    directory.mkdir()
    trainer.file_bytes = 20_000
    trainer.write_weights(directory, apart=True)
    write_index(directory)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_pod_gets_the_whole_export(tmp_path: Path, tied: bool, dtype: str) -> None:
    """Three ranks, among which no tensor divides evenly."""
    model = write_tiny_model(tmp_path / "model", tied=tied)

    in_ranks(3, tmp_path, model, export_in_small_files, dtype=dtype)

    wanted = load_file(model / "model.safetensors")
    for rank in range(3):
        files = sorted((tmp_path / f"export-{rank}").glob("*.safetensors"))
        assert 2 < len(files)
        found = {name: tensor for file in files for name, tensor in load_file(file).items()}
        assert wanted.keys() == found.keys()
        for name, tensor in wanted.items():
            assert torch.equal(tensor.to(getattr(torch, dtype)), found[name]), name
        assert {"F32" if dtype == "float32" else "BF16"} == {
            entry.dtype for file in files for entry in tensor_entries(file).values()
        }


def export_and_measure(trainer: UnwatchedTrainer) -> int:
    """Return how much the process of this rank grew where it writes as slowly as can be."""
    directory = trainer._settings.checkpoints.parent / f"export-{trainer.rank}"
    directory.mkdir()
    trainer.file_bytes = FILE_BYTES
    rank, write = threading.get_ident(), tensor_file.write_tensors

    def rank_waits() -> bool:
        return sys._current_frames()[rank].f_code.co_filename == threading.__file__

    def write_when_waited_for(*args: Any, **options: Any) -> Digest:
        wait_until("rank waits for a write", rank_waits, deadline_s=60)
        return write(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "write_tensors", write_when_waited_for)
        return resident_growth(partial(trainer.write_weights, directory, apart=True))


def test_memory_of_an_export_is_bounded_by_its_files_not_by_the_model(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", hidden=512, layers=16)
    size = (model / "model.safetensors").stat().st_size
    assert 32 * FILE_BYTES < size

    held = 2 + Writers().threads  # each thread has one file, and what is written of it goes in parts
    assert held < 16

    for grown in in_ranks(2, tmp_path, model, export_and_measure):
        assert isinstance(grown, int), grown
        assert grown < held * FILE_BYTES


def export_divided(trainer: UnwatchedTrainer) -> tuple[list[str], Exported | None]:
    """Return the names of the files that this rank wrote, and what it returned."""
    trainer.file_bytes = 20_000
    settings, write, mine = trainer._settings, trainer._write_weights, list[str]()

    def write_and_tell(directory: Path, writers: Writers) -> Mapping[str, Digest]:
        written = write(directory, writers)
        mine.extend(written)
        return written

    trainer._write_weights = write_and_tell  # type: ignore[method-assign]
    directory = settings.checkpoints.parent / f"pod-{settings.first_of_pod}-of-{settings.world_size}/1-1"
    if settings.writes_weights:  # the others wait for that
        directory.mkdir(parents=True)
    return mine, trainer.export(directory)


@pytest.mark.parametrize("config", [{}, {"dtype": "bfloat16"}, {"trainingState": "Replicated"}], ids=str)
def test_ranks_of_a_pod_write_the_export_of_one_rank_each_its_own_files(
    tmp_path: Path, config: dict[str, object]
) -> None:
    """One of them wrote all files, and the others waited. The second pod has one rank."""
    origin = write_tiny_model(tmp_path / "model", tied=False)
    [(_, alone)] = in_ranks(1, tmp_path, origin, export_divided, **config)
    expected = {file.name: file.read_bytes() for file in (tmp_path / "pod-0-of-1/1-1").iterdir()}
    assert alone is not None

    (one, exported), (other, nothing), (last, exported_too) = in_ranks(
        3, tmp_path, origin, export_divided, in_pod=2, **config
    )

    assert sorted([*one, *other]) == sorted(last) == sorted(alone.digests)
    assert min(len(one), len(other)) >= len(last) // 3
    assert nothing is None
    for pod, found in (("pod-0-of-3", exported), ("pod-2-of-3", exported_too)):
        assert alone.digests == found.digests
        assert expected == {file.name: file.read_bytes() for file in (tmp_path / pod / "1-1").iterdir()}
        assert found.digests == digests_of(sorted((tmp_path / pod / "1-1").glob("*.safetensors")))


def disk_of(trainer: UnwatchedTrainer) -> AbstractContextManager[None]:
    """Full for rank 1."""
    return no_file_above(1000) if trainer.rank == 1 else nullcontext()


def export_beside_a_full_volume(trainer: UnwatchedTrainer) -> str:
    directory = trainer._settings.checkpoints.parent / f"export-{trainer.rank}"
    directory.mkdir()
    trainer.file_bytes = 20_000
    try:
        with disk_of(trainer):
            trainer.write_weights(directory, apart=True)
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return f"{len(list(directory.glob('*.safetensors')))} files"


def test_rank_whose_volume_is_full_leaves_the_exports_of_its_peers_whole(tmp_path: Path) -> None:
    outcomes = in_ranks(2, tmp_path, write_tiny_model(tmp_path / "model"), export_beside_a_full_volume)

    assert "EFBIG" == outcomes[1]
    assert re.fullmatch(r"[3-9] files", str(outcomes[0]))


def export_beside_a_full_volume_and_go_on(trainer: UnwatchedTrainer) -> str:
    directory = trainer._settings.checkpoints.parent / f"export-{trainer.rank}"
    directory.mkdir()
    outcome = "exported"
    try:
        with disk_of(trainer):
            trainer.export(directory)
    except OSError as error:
        outcome = errno.errorcode[error.errno or 0]
    except Refused as error:
        outcome = str(error)
    train(trainer)
    return outcome


def test_rank_whose_volume_is_full_keeps_no_peer_waiting(tmp_path: Path) -> None:
    """Its peers went on to the probe, and waited there for its part of every layer."""
    outcomes = in_ranks(2, tmp_path, write_tiny_model(tmp_path / "model"), export_beside_a_full_volume_and_go_on)

    assert "EFBIG" == outcomes[1]
    assert "rank 1: [Errno 27] File too large" in outcomes[0]


def export_into_a_full_volume_and_go_on(trainer: UnwatchedTrainer, *, full_for: int) -> tuple[str, str]:
    """Return how an export ended for which one rank had no room, and a second one into an empty directory."""
    trainer.file_bytes = 20_000
    outcomes = []
    for name in ("full", "empty"):
        directory = trainer._settings.checkpoints.parent / name
        if trainer._settings.writes_weights:
            directory.mkdir()
        is_full = name == "full" and trainer.rank == full_for
        try:
            with no_file_above(10_000) if is_full else nullcontext():
                trainer.export(directory)
        except (OSError, Refused) as error:
            outcomes.append(str(error))
        else:
            outcomes.append("exported")
    train(trainer)
    return outcomes[0], outcomes[1]


@pytest.mark.parametrize("full_for", [0, 1])
@pytest.mark.parametrize("state", ["Sharded", "Replicated"])
def test_export_that_one_rank_of_a_pod_can_not_write_fails_on_all_of_them(
    tmp_path: Path, full_for: int, state: str
) -> None:
    """Nobody writes a manifest then, and the next export finds all of them."""
    model = write_tiny_model(tmp_path / "model")
    export = partial(export_into_a_full_volume_and_go_on, full_for=full_for)

    outcomes = in_ranks(2, tmp_path, model, export, in_pod=2, trainingState=state)

    assert all("[Errno 27] File too large" in first for first, _ in outcomes), outcomes
    assert f"rank {full_for}: " in outcomes[1 - full_for][0]
    assert ["exported", "exported"] == [second for _, second in outcomes]


# ---------------------------------------------------------------------------------------------------- what a job leaves
def train_and_leave(trainer: UnwatchedTrainer) -> dict[str, list[float]]:
    train(trainer)
    folder = trainer._settings.checkpoints
    export_in_small_files(trainer)
    trainer.offload()
    trainer.save(trainer.step, 2)
    if trainer.rank == 0:
        export = folder.parent / "export-0"
        write_manifest(export, WeightVersion(1, 1), Exported())
        save_final_model(export, folder / finished_model(1), progress=trainer.progress)
    trainer.onload()
    return {name: whole(tensor).flatten().tolist() for name, tensor in trainer.model.state_dict().items()}


def test_model_that_sharded_ranks_leave_is_an_ordinary_one(tmp_path: Path) -> None:
    """It has the files that stood beside the weights of the user's model."""
    origin = write_tiny_model(tmp_path / "model")
    (origin / "generation_config.json").write_text('{"temperature": 0.5, "do_sample": true}')

    state, *_ = in_ranks(3, tmp_path, origin, train_and_leave, learningRate=1e-2)

    left = tmp_path / "checkpoints" / finished_model(1)
    model = AutoModelForCausalLM.from_pretrained(left, local_files_only=True)
    assert state == {name: tensor.flatten().tolist() for name, tensor in model.state_dict().items()}
    assert model.generation_config.temperature == 0.5
    tokenizer = AutoTokenizer.from_pretrained(left, local_files_only=True)
    assert tokenizer("w3 w4").input_ids == AutoTokenizer.from_pretrained(origin)("w3 w4").input_ids


# ---------------------------------------------------------------------------------------------------------- checkpoints
def train_and_save(trainer: UnwatchedTrainer) -> dict[str, list[float]]:
    train(trainer)
    trainer.offload()
    trainer.save(trainer.step, 2)
    return state_of(trainer)


@pytest.mark.parametrize("again", [1, pytest.param(2, marks=pytest.mark.release), 4])
def test_checkpoint_is_gone_on_from_by_another_number_of_ranks(tmp_path: Path, again: int) -> None:
    """Saved by three, and once more by those that went on."""
    model = write_tiny_model(tmp_path / "model")
    saved, *_ = in_ranks(3, tmp_path, model, train_and_save, learningRate=1e-2)

    for state in in_ranks(again, tmp_path, model, state_of):
        assert saved == state

    further, *_ = in_ranks(again, tmp_path, model, train_and_save, learningRate=1e-2)
    alone = RankInProcess(tmp_path, model)
    assert 2 == alone.step
    assert further == {name: tensor.flatten().tolist() for name, tensor in alone.loop._state.saved().items()}


@dataclass(frozen=True)
class Touch:
    """Makes this file when a pickle of it is read."""

    file: Path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.file,)


def make_a_call_of_its_description(directory: Path, call: Touch) -> None:
    (directory / METADATA).write_bytes(pickle.dumps(call))


def make_a_call_of_a_tensor(directory: Path, call: Touch) -> None:
    """torch unpickles whatever is declared to be no tensor, even if a tensor is asked for."""
    metadata, file = pickle.loads((directory / METADATA).read_bytes()), io.BytesIO()
    torch.save(call, file)
    (directory / "call").write_bytes(file.getvalue())
    ((index, place),) = metadata.storage_data.items()
    metadata.state_dict_metadata[index.fqn] = BytesStorageMetadata()
    called = replace(place, relative_path="call", offset=0, length=len(file.getvalue()))
    metadata.storage_data = {MetadataIndex(index.fqn): called}
    (directory / METADATA).write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("change", [make_a_call_of_its_description, make_a_call_of_a_tensor])
def test_a_checkpoint_of_others_calls_nothing(tmp_path: Path, change: Callable[[Path, Touch], None]) -> None:
    """spec.restoreFrom may name one that somebody else made. torch's own reader does what its pickles say."""
    directory, call = tmp_path / "checkpoint", Touch(tmp_path / "called")
    directory.mkdir()
    write_parts({"weight": torch.arange(3.0)}, directory)
    found = torch.zeros(3)
    read_parts({"weight": found}, directory)
    assert ([0, 1, 2], {"weight": (3,)}) == (found.tolist(), shapes_in(directory))

    change(directory, call)
    with pytest.raises(Refused, match="something else in it than tensors"):
        shapes_in(directory)
    with pytest.raises(CheckpointBroken, match="something else in it than tensors"):
        read_parts({"weight": found}, directory)
    assert not call.file.exists()


@pytest.mark.parametrize("name", ["/dev/zero", "../checkpoint/__0_0.distcp", "", None])
def test_a_checkpoint_of_others_names_no_file_but_its_own(tmp_path: Path, name: str | None) -> None:
    """torch opens whatever file a description names, and reads as much of it as that says."""
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    write_parts({"weight": torch.arange(3.0)}, directory)
    metadata = pickle.loads((directory / METADATA).read_bytes())
    metadata.storage_data = {key: replace(place, relative_path=name) for key, place in metadata.storage_data.items()}
    (directory / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(Refused, match="names a file that is not beside it"):
        shapes_in(directory)
    with pytest.raises(CheckpointBroken, match="names a file that is not beside it"):
        read_parts({"weight": torch.zeros(3)}, directory)


@pytest.mark.parametrize(
    "target",
    [
        b"cpathlib\nPosixPath\n",
        b"ctorch.serialization\n_get_layout\n",
        b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n(I0\ntR",
    ],
    ids=["a class", "a function", "a member of an enum"],
)
def test_a_checkpoint_of_others_changes_no_class_of_the_process(tmp_path: Path, target: bytes) -> None:
    """A pickle may set attributes of whatever it has named, and a method of PosixPath was a number from then on."""
    (tmp_path / METADATA).write_bytes(target + b"(N(S'is_dir'\nI7\ndtb.")
    with pytest.raises(Refused, match="something else in it than tensors: an attribute of"):
        shapes_in(tmp_path)
    assert tmp_path.is_dir()


class PicklerOfDebian(pickle.Pickler):
    """Pickles as Python 3.11.2 does: a member of an enum by `getattr`."""

    def reducer_override(self, value: object) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


class Taker:
    def __init__(self, kind: object, name: str) -> None:
        self.of = kind, name

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return getattr, self.of


def test_a_checkpoint_of_another_python_is_read_and_no_attribute_but_of_an_enum_is_taken(tmp_path: Path) -> None:
    """Every restart of a job whose images had Debian's own Python was refused its checkpoint."""
    write_parts({"weight": torch.arange(3.0)}, tmp_path)
    file = tmp_path / METADATA
    described = io.BytesIO()
    PicklerOfDebian(described).dump(pickle.loads(file.read_bytes()))
    assert b"getattr" in described.getvalue()
    file.write_bytes(described.getvalue())
    assert {"weight": (3,)} == shapes_in(tmp_path)
    for kind, name in ((MetadataIndex, "__init__"), (_MEM_FORMAT_ENCODING, "mro")):
        file.write_bytes(pickle.dumps(Taker(kind, name)))
        with pytest.raises(Refused, match="something else in it than tensors"):
            shapes_in(tmp_path)


def save_and_say_what(trainer: UnwatchedTrainer) -> dict[str, int]:
    """Return the bytes of each tensor of the state."""
    train(trainer)
    trainer.save(1, 2)
    return {name: tensor.numel() * tensor.element_size() for name, tensor in trainer.state_to_keep().items()}


@pytest.mark.parametrize("state", ["Sharded", "Replicated"])
def test_each_byte_of_the_state_is_written_once_and_each_rank_writes_as_much(tmp_path: Path, state: str) -> None:
    """One of the ranks writes each tensor that all of them have, and not always the same one."""
    ranks, model = 3, write_tiny_model(tmp_path / "model")
    held, *_ = in_ranks(ranks, tmp_path, model, save_and_say_what, trainingState=state)

    directory = tmp_path / "checkpoints" / "step-00000001"
    metadata = dcp.FileSystemReader(directory).read_metadata()
    sizes = {path.name: path.stat().st_size for path in directory.glob("__*")}
    pieces = [
        (chunk.sizes.numel() * stored.properties.dtype.itemsize, name)
        for name, stored in metadata.state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata)
        for chunk in stored.chunks
    ]
    written = {name: sum(size for size, of in pieces if of == name) for name in held}
    assert held == written, "no part of a tensor is there twice, and none is missing"
    assert len(pieces) == len(metadata.storage_data)
    assert sum(sizes.values()) == sum(place.length for place in metadata.storage_data.values()), "nothing else is"
    of_rank = [sum(size for name, size in sizes.items() if name.startswith(f"__{rank}_")) for rank in range(ranks)]
    assert max(of_rank) < 1.5 * sum(of_rank) / ranks


def save_to_a_full_volume(trainer: UnwatchedTrainer) -> tuple[str, int]:
    """Return the error, and the checkpoint that existed then; once there is room, all ranks save."""
    train(trainer)
    try:
        with disk_of(trainer):
            trainer.save(1, 2)
    except (OSError, Refused) as error:
        outcome, left = str(error), len(list(trainer._settings.checkpoints.iterdir()))
        trainer.save(1, 2)
        return outcome, left
    return "saved", 1


def test_checkpoint_that_one_rank_cannot_write_is_nobodys_until_there_is_room(tmp_path: Path) -> None:
    outcomes = in_ranks(2, tmp_path, write_tiny_model(tmp_path / "model"), save_to_a_full_volume)

    assert ["File too large" in str(words) for words, _ in outcomes] == [True, True], outcomes
    assert 0 == outcomes[0][1], "no draft is left to fill the volume"
    assert ["step-00000001"] == [path.name for path in (tmp_path / "checkpoints").iterdir()]


def save_what_one_rank_cannot_read_back(trainer: UnwatchedTrainer) -> tuple[str, int]:
    """Return the error, and the steps that are saved once the rank can read them back."""
    train(trainer)
    write = trainer._write_checkpoint

    def write_and_spoil(directory: Path) -> None:
        write(directory)
        if trainer.rank == 1:
            (directory / "__1_spoilt").mkdir()

    trainer._write_checkpoint = write_and_spoil  # type: ignore[method-assign]
    try:
        trainer.save(1, 2)
    except (OSError, Refused) as error:
        error_text = str(error)
    trainer._write_checkpoint = write  # type: ignore[method-assign]
    trainer.save(1, 2)
    return error_text, len(list(trainer._settings.checkpoints.iterdir()))


def test_checkpoint_that_one_rank_cannot_read_back_keeps_no_peer_waiting(tmp_path: Path) -> None:
    """Its peers waited for its digests until their deadline, and then for a new lineage."""
    outcomes = in_ranks(2, tmp_path, write_tiny_model(tmp_path / "model"), save_what_one_rank_cannot_read_back)

    assert [1, 1] == [saved for _, saved in outcomes]
    assert "rank 1: [Errno 21] Is a directory" in outcomes[0][0]
    assert "[Errno 21] Is a directory" in outcomes[1][0]


def read_what_one_rank_does_not_see(trainer: UnwatchedTrainer, *, blind: int) -> None:
    train_and_save(trainer)
    saved = trainer._settings.checkpoints / "step-00000001"
    trainer._read_checkpoint(saved / "nowhere" if trainer.rank == blind else saved)


@pytest.mark.parametrize("blind", [0, 1])
def test_checkpoint_that_one_rank_cannot_read_keeps_no_peer_waiting(tmp_path: Path, blind: int) -> None:
    """It ended before it met its peers, and they knew no more than that one was lost in a load."""
    model = write_tiny_model(tmp_path / "model")
    outcomes = in_ranks(2, tmp_path, model, partial(read_what_one_rank_does_not_see, blind=blind))

    assert f"rank {blind}: " in str(outcomes[1 - blind])
    assert ["No such file" in str(each) for each in outcomes] == [True, True], outcomes


# ----------------------------------------------------------------------------------------------------------- lost peers
def lose_a_peer_in_a_pass(trainer: UnwatchedTrainer) -> None:
    if trainer.rank == 1:
        trainer.model.model.layers[1].register_forward_pre_hook(lambda *_: os._exit(1))
    train(trainer)


def test_rank_that_loses_a_peer_in_a_pass_says_so(tmp_path: Path) -> None:
    left, gone = in_ranks(2, tmp_path, write_tiny_model(tmp_path / "model"), lose_a_peer_in_a_pass)

    assert isinstance(gone, EOFError)
    assert isinstance(left, GroupLost)
    assert "a peer was lost in a step" in str(left)


@pytest.mark.parametrize("room", [0, 700, 30_000, 100_000, 390_000])
def test_parts_for_which_there_is_no_room_are_the_volumes_fault(tmp_path: Path, room: int) -> None:
    """torch completes its archive after a failed write, and complains of that alone: as of a broken checkpoint."""
    parts = {f"parameter {number}": torch.ones(5_000) for number in range(20)}

    with no_file_above(room), pytest.raises(OSError, match=r"rank 0: .*File too large") as refused:
        write_parts(parts, tmp_path)

    assert errno.EFBIG == refused.value.errno
