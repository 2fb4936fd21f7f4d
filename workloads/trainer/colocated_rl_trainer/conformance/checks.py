"""Check a trainer, by one function for each check, in the order in which they run on one group of ranks.

Each finds the ranks ONLOADED, at any step, and leaves them so; the last but one ends them, and the last starts others.
Batches are of random tokens: the checks show that a trainer learns, not how well. A check that fails raises Broken.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import signal
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

from colocated_rl_api.facts import TrainerState
from colocated_rl_api.rungs import WeightVersion
from colocated_rl_api.trainer_wire import PROTOCOL, TrainerError, TrainerStatus
from colocated_rl_api.weights import MANIFEST, Digest, Manifest, TensorEntry, finished_model
from colocated_rl_trainer.conformance.ranks import TrainerGroup, TrainerKind, UnexpectedStatus
from colocated_rl_trainer.conformance.shards import Example, write_shards
from colocated_rl_trainer.protocol.manifest import digests_of, read_header, tensor_entries

PROMPT_END_S = 5.0
BEGIN_S = 1.0  # for a rank to begin a step
STATE_S = 30.0  # for /v1/state to be answered; an agent gives up after two minutes without an answer
GROUPS, GROUP_SIZE = 4, 4
SAME_AT_MOST = 0.5  # of a step's change: devices add in any order; an optimizer without its moments is off by more
ROUNDING_NATS = 1e-3  # above 0, of a probability of one
COMPARED_OF_A_TENSOR = 4096  # leading numbers: they are enough, and no library is needed
BESIDE_WEIGHTS = ("config.json", "tokenizer_config.json")  # of any model that has them: every library writes both
_FORMATS = {"F64": "d", "F32": "f", "F16": "e", "BF16": "H"}

Check = Callable[[TrainerGroup], None]


class Broken(AssertionError):
    """The trainer does not follow the protocol."""


def expect(holds: bool, message: str) -> None:
    if not holds:
        raise Broken(message)


# ---------------------------------------------------------------------------------------------------------- the checks
def says_who_it_is_and_where_it_stands(trainer: TrainerGroup) -> None:
    for number, rank in enumerate(trainer.ranks):
        status = rank.status
        reported = (status.protocol, status.rank, status.lineage)
        wanted = (PROTOCOL, number, trainer.lineage)
        expect(reported == wanted, f"(protocol, rank, lineage) of rank {number} are {reported}, not {wanted}")
        expect(status.step is not None and not status.dirty, f"rank {number} has loaded and reports {status}")


def lets_its_group_use_the_socket(trainer: TrainerGroup) -> None:
    for rank in trainer.ranks:
        mode = rank.socket.stat().st_mode & 0o777
        expect(mode & 0o077 == 0o060, f"{rank.socket} has mode {mode:o}: the agent is of the group, and no one else")


def can_be_asked_twice_for_each_move(trainer: TrainerGroup) -> None:
    for move, state in ((trainer.offload, TrainerState.OFFLOADED), (trainer.onload, TrainerState.ONLOADED)):
        for _ in range(2):
            reported = {status.state for status in move()}
            expect(reported == {state}, f"after {move.__name__} ranks are {reported}")


def trains_a_step_once_and_answers_it_again(trainer: TrainerGroup) -> None:
    step, files = _next_batch(trainer)
    first = trainer.train(step, files)
    again = trainer.train(step, files)
    expect({status.step for status in first} == {step}, f"step {step} is trained, and ranks stand at {_steps(first)}")
    expect(first == again, f"asked for step {step} again, it did not answer what it had: {first[0]}, then {again[0]}")
    expect(not any(status.dirty for status in first), f"step {step} is finished, and a rank is still dirty")


def trains_once_what_is_asked_twice_at_once(trainer: TrainerGroup) -> None:
    step, files = _next_batch(trainer)
    with ThreadPoolExecutor() as pool:
        first, other = (request.result() for request in [pool.submit(trainer.train, step, files) for _ in range(2)])
    expect(first == other, f"two requests for step {step} at once had two answers")
    expect(_step_of(trainer) == step, f"two requests for step {step} at once led to step {_step_of(trainer)}")


def answers_its_state_during_a_step(trainer: TrainerGroup) -> None:
    """Ask rank 0 alone to begin: in a collective step it then waits for its peers, for as long as it is looked at."""
    step, files = _next_batch(trainer)
    if trainer.kind.has_reference:
        trainer.score(step, files)
    first, *others = trainer.ranks
    seen: list[TrainerStatus] = []
    with ThreadPoolExecutor(trainer.size + 1) as pool:
        training = [pool.submit(first.train, step, files[0])]
        try:
            look_until = time.monotonic() + BEGIN_S
            is_silent = False
            while not (is_silent or training[0].done() or _is_training(seen) or time.monotonic() > look_until):
                asked = pool.submit(lambda: first.status)
                is_silent = not wait([asked], STATE_S).done
                if not is_silent:
                    seen.append(asked.result())
            training += [pool.submit(rank.train, step, file) for rank, file in zip(others, files[1:], strict=True)]
            while not all(each.done() for each in training):
                seen.append(first.status)
        finally:
            for each in training:
                each.result()  # a step that fails is why a rank does not answer any more
    expect(
        not is_silent, f"GET /v1/state got no answer in {STATE_S:.0f} s of a step: an agent gives up on such a trainer"
    )
    states = {status.state for status in seen}
    expect(
        states <= {TrainerState.ONLOADED, TrainerState.SCORING, TrainerState.TRAINING},
        f"during a step it reports {states}",
    )
    early = any(status.step == step for status in seen if status.state is TrainerState.TRAINING)
    expect(not early, f"step {step} is reported as finished while it is trained: its weights would be exported")


def _is_training(seen: Sequence[TrainerStatus]) -> bool:
    return bool(seen) and seen[-1].state is TrainerState.TRAINING


def makes_progress_in_a_step(trainer: TrainerGroup) -> None:
    """Check progress: without it, a step that takes longer than its deadline counts as hanging."""
    before = [rank.status.progress for rank in trainer.ranks]
    step, files = _next_batch(trainer)
    after = [status.progress for status in trainer.train(step, files)]
    rises = [late > early for early, late in zip(before, after, strict=True)]
    expect(all(rises), f"`progress` was {before} before step {step} and is {after} after it: call watch.progress()")


def refuses_a_step_that_is_not_next(trainer: TrainerGroup) -> None:
    step = _step_of(trainer)
    for ahead in (-1, 2):
        _expect_conflict(
            trainer, f"training step {step + ahead} at step {step}",
            lambda ahead=ahead: trainer.ranks[0].train(step + ahead, trainer.folder / "no-such-shard"),  # type: ignore[misc]
        )  # fmt: skip
    expect(_step_of(trainer) == step, f"a refused step led from {step} to {_step_of(trainer)}")


def does_no_work_while_offloaded(trainer: TrainerGroup) -> None:
    step, files = _next_batch(trainer)
    never = trainer.folder / "never"
    trainer.offload()
    _expect_conflict(trainer, "training while offloaded", lambda: trainer.ranks[0].train(step, files[0]))
    version = WeightVersion(step - 1, trainer.lineage)
    _expect_conflict(trainer, "exporting while offloaded", lambda: trainer.ranks[0].export(version, never))
    trainer.onload()
    expect(not never.exists(), "a refused export left a directory")


def changes_nothing_for_a_request_that_makes_no_sense(trainer: TrainerGroup) -> None:
    rank = trainer.ranks[0]
    before = rank.status
    for body in ("{", "[]", '{"step": "one"}', '{"step": 1}'):
        code, content = rank.ask_raw("POST", "/v1/train", body)
        expect(code == 400, f"POST /v1/train {body} is answered {code}, not 400")
        reported = TrainerError.model_validate(content)
        expect(bool(reported.error and reported.message), f"400 without error and message: {content}")
    expect(rank.status == before, f"senseless requests changed the state: {before}, then {rank.status}")


def ignores_what_it_does_not_know_in_a_request(trainer: TrainerGroup) -> None:
    """Check that the trainer goes on with a newer agent: fields are added to requests within a protocol version."""
    for code, content in trainer.all(lambda _, rank: rank.ask_raw("POST", "/v1/onload", '{"added": {"later": 1}}')):
        expect(code == 200, f"POST /v1/onload with a field that is not in the protocol is answered {code}: {content}")


def scores_a_batch_before_it_trains_it(trainer: TrainerGroup) -> None:
    """Run this only in a job with a reference."""
    step, files = _next_batch(trainer)
    _expect_conflict(trainer, f"training step {step} unscored", lambda: trainer.ranks[0].train(step, files[0]))
    first = trainer.score(step, files)
    reported = {(status.step, status.scored, status.state, status.dirty) for status in first}
    wanted = {(step - 1, step, TrainerState.ONLOADED, False)}
    expect(reported == wanted, f"after scoring step {step}, (step, scored, state, dirty) are {reported}, not {wanted}")
    again = trainer.score(step, files)
    expect(first == again, f"asked to score step {step} again, it did not answer what it had: {again[0]}")
    expect({status.step for status in trainer.train(step, files)} == {step}, f"step {step} is scored and not trained")


def refuses_to_score_what_is_not_next_or_while_offloaded(trainer: TrainerGroup) -> None:
    """Run this only in a job with a reference."""
    step, files = _next_batch(trainer)
    _expect_conflict(
        trainer, f"scoring step {step + 1} at step {step - 1}", lambda: trainer.ranks[0].score(step + 1, files[0])
    )
    trainer.offload()
    _expect_conflict(trainer, "scoring while offloaded", lambda: trainer.ranks[0].score(step, files[0]))
    trainer.onload()


def exports_what_is_whole_named_and_readable(trainer: TrainerGroup) -> None:
    step = train_next(trainer)
    for folder in trainer.export(step):
        expect((folder / MANIFEST).is_file(), f"{folder} has no {MANIFEST}")
        manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
        files = sorted(folder.glob("*.safetensors"))
        tensors = {name: entry for file in files for name, entry in tensor_entries(file).items()}
        wanted = WeightVersion(step, trainer.lineage)
        expect(manifest.version == wanted, f"the manifest names {manifest.version}, not {wanted}")
        expect(manifest.digests == digests_of(files, like=manifest.digests), "digests are not those of the files")
        expect(manifest.tensors == tensors, "tensors of the manifest are not those of the files")
        hidden = [file.name for file in folder.iterdir() if file.stat().st_mode & 0o060 != 0o060]
        expect(not hidden, f"the group can't read and write {hidden}")
        model = trainer.kind.model
        lacking = [name for name in BESIDE_WEIGHTS if (model / name).is_file() and not (folder / name).is_file()]
        expect(not lacking, f"the export lacks {lacking} of the model: an engine that starts on it needs them")
        _expect_tensors_of(model, tensors)
        if manifest.probe is not None:
            lengths = (len(manifest.probe.input_ids), len(manifest.probe.logp) + 1)
            expect(lengths[0] == lengths[1], "a probe has a log-probability for each token but the first")
            most = max(manifest.probe.logp, default=0.0)
            expect(most <= ROUNDING_NATS, f"a log-probability of the probe is {most:.2g}, and none is above 0")
    reported = {rank.status.exported for rank in trainer.ranks}
    expect(reported == {WeightVersion(step, trainer.lineage)}, f"ranks say that they exported {reported}")


def _expect_tensors_of(model: Path, exported: Mapping[str, TensorEntry]) -> None:
    """Expect most of the model's tensors in an export, by name and shape: an engine silently ignores other names (H52).

    Not all of them: libraries don't load heads that are tied, nor layers that predict further tokens. The first part of
    GPT-2's names is in some files and not in others, and engines read both.
    """
    found = {name.removeprefix("transformer."): entry.shape for name, entry in exported.items()}
    wanted = {name: entry.shape for file in model.glob("*.safetensors") for name, entry in tensor_entries(file).items()}
    lacking = [name for name, shape in wanted.items() if found.get(name.removeprefix("transformer.")) != shape]
    expect(
        2 * len(lacking) <= len(wanted),
        f"the export lacks {len(lacking)} of the model's {len(wanted)} tensors by name and shape, first "
        f"{min(lacking, default='')}; its own first is {min(exported, default='')}: write them as the model's files do",
    )


def exports_the_same_weights_in_every_pod(trainer: TrainerGroup) -> None:
    digests = {json.dumps(_digests(folder)) for folder in trainer.export(train_next(trainer))}
    expect(len(digests) == 1, "weights of one version differ between pods")


def changes_its_weights_by_training(trainer: TrainerGroup) -> None:
    """Train on rewards that differ within every group, so that each batch teaches something."""
    first, second = (_digests(trainer.export(train_next(trainer))[0]) for _ in range(2))
    expect(
        first != second,
        "a step leaves the weights as they were, to the bit: is the optimizer called, with a learning rate that the "
        "dtype of exports can show?",
    )


def trains_a_batch_that_leaves_ranks_without_a_sample(trainer: TrainerGroup) -> None:
    """Train a batch as the last one of a job may be: with fewer samples than the job has ranks."""
    step = _step_of(trainer) + 1
    files = batch(trainer, step, all_for_the_last=True)
    reported = {status.step for status in trainer.train(step, files)}
    expect(
        reported == {step}, f"step {step}, with samples for the last rank alone, is trained, and ranks are {reported}"
    )


def writes_an_export_once(trainer: TrainerGroup) -> None:
    step = train_next(trainer)
    files = [folder / MANIFEST for folder in trainer.export(step)]
    first = [file.stat().st_mtime_ns for file in files]
    trainer.export(step)
    expect(first == [file.stat().st_mtime_ns for file in files], "an export that was whole was written again")


def replaces_a_torn_export(trainer: TrainerGroup) -> None:
    step = train_next(trainer)
    torn = trainer.export_directory(0, step)
    torn.mkdir()
    (torn / "left.safetensors").write_bytes(b"half")
    trainer.export(step)
    expect((torn / MANIFEST).exists(), f"a torn export stayed without its {MANIFEST}")
    expect(not (torn / "left.safetensors").exists(), "a file of a torn export stayed")


def refuses_to_export_other_weights(trainer: TrainerGroup) -> None:
    step, never = _step_of(trainer), trainer.folder / "never"
    for version in (WeightVersion(step, trainer.lineage + 1), WeightVersion(step + 1, trainer.lineage)):
        _expect_conflict(
            trainer, f"exporting {version} at {step}-{trainer.lineage}",
            lambda version=version: trainer.ranks[0].export(version, never),  # type: ignore[misc]
        )  # fmt: skip
    expect(not never.exists(), "a refused export left a directory")


def saves_while_offloaded(trainer: TrainerGroup) -> None:
    step = train_next(trainer)
    trainer.offload()
    for _ in range(2):
        for status in trainer.save(step):
            expect(status.saved == step, f"saved step {step}, and `saved` is {status.saved}")
            oldest = status.replay_from
            expect(oldest is None or oldest <= step, f"`replay_from` is {oldest}, after the checkpoint of step {step}")
    trainer.onload()


def outlives_a_checkpoint_that_it_cannot_write(trainer: TrainerGroup) -> None:
    """Replace the checkpoints' directory by a file: root can't write there either."""
    step = train_next(trainer)
    place, away = trainer.checkpoints, trainer.checkpoints.with_name("away")
    place.rename(away)
    place.touch()
    try:
        answers = trainer.all(lambda _, rank: _code(lambda: rank.save(step)))
    finally:
        place.unlink()
        away.rename(place)
    expect(set(answers) == {503}, f"saves that can't be written are answered {answers}, not each 503")
    for status in (rank.status for rank in trainer.ranks):
        expect(status.step == step and status.saved != step, f"after a save that was not written it is {status}")
    reported = {status.saved for status in trainer.save(step)}
    expect(reported == {step}, f"saved step {step} once it could be written, and `saved` is {reported}")


def leaves_an_export_as_the_model_if_it_says_so(trainer: TrainerGroup) -> None:
    first = trainer.ranks[0]
    if not first.status.can_finish:
        return
    step = train_next(trainer)
    version, model = WeightVersion(step, trainer.lineage), trainer.folder / "checkpoints" / finished_model(step)
    export = trainer.export(step)[0]
    trainer.offload()
    _expect_conflict(trainer, "finishing before the step is saved", lambda: first.finish(version, export, model))
    trainer.save(step)
    for _ in range(2):
        reported = first.finish(version, export, model).finished
        expect(reported == version, f"left {version} as the model, and `finished` is {reported}")
    left = {file.name: file.read_bytes() for file in model.iterdir() if file.is_file()}
    expect(
        left == {file.name: file.read_bytes() for file in export.iterdir() if file.is_file()},
        "the model that was left is not the export",
    )
    trainer.onload()


def goes_on_from_its_checkpoint_when_it_is_killed(trainer: TrainerGroup) -> None:
    """End the ranks, and start the next lineage where they saved."""
    for _ in range(2):  # so that the optimizer's state is of several steps
        train_next(trainer)
    saved = train_next(trainer)
    begun = trainer.export(saved)[0]
    trainer.save(saved)
    trainer.offload()  # as in every step of a job: the checkpoint shows what that loses
    trainer.onload()
    lost = train_next(trainer)
    gone = trainer.export(lost)[0]
    trainer.end()
    with TrainerGroup(
        trainer.kind, trainer.folder, size=trainer.size, lineage=trainer.lineage + 1, device=trainer.device
    ) as again:
        reported = {(status.step, status.saved) for status in again.wait_loaded()}
        expect(reported == {(saved, saved)}, f"saved at step {saved}; after a restart (step, saved) are {reported}")
        again.onload()
        same = _digests(begun) == _digests(again.export(saved)[0])
        expect(same, f"weights of step {saved} are others after a restart")
        again.train(lost, batch(again, lost))
        apart, moved = _distance(again.export(lost)[0], gone), _distance(gone, begun)
        expect(
            apart <= SAME_AT_MOST * moved,
            f"step {lost}, trained again on the same batch after a restart, leads elsewhere: {apart:.2g} away, and the "
            f"step itself is {moved:.2g} long: does a checkpoint hold the optimizer's state, and do `offload` and "
            "`onload` keep all of it and the weights?",
        )
        refuses_a_shard_that_is_torn(again)
        _end_by_signal(again)


def refuses_a_shard_that_is_torn(trainer: TrainerGroup) -> None:
    """Let the trainer end if it likes; it must not count the shard as a step."""
    step, files = _next_batch(trainer)
    torn = trainer.folder / "torn"
    torn.write_bytes(files[0].read_bytes()[:100])
    try:
        trainer.train(step, [torn] * trainer.size)
    except (UnexpectedStatus, OSError):
        for rank in trainer.ranks:
            with contextlib.suppress(FileNotFoundError, ConnectionError):  # it ends, or has ended
                status = rank.status
                expect((status.step, status.dirty) == (step - 1, False), f"over a torn shard it came to be {status}")
        return
    raise Broken("a shard that is cut off after 100 bytes was trained on")


def has_rank_0_write_alone_where_pods_share_the_weights(trainer: TrainerGroup) -> None:
    """Check that rank 0 alone writes in a job whose engines have pods of their own.

    Each pod gets a directory of its own here, so that the files of a second writer are seen.
    """
    kind = replace(trainer.kind, is_apart=True)
    with TrainerGroup(
        kind, trainer.folder, size=trainer.size, lineage=trainer.lineage + 2, device=trainer.device
    ) as apart:
        apart.wait_loaded()
        apart.onload()
        first, *others = apart.export(_step_of(apart))
        expect((first / MANIFEST).is_file(), f"rank 0 wrote no {MANIFEST}")
        written = [rank for rank, folder in enumerate(others, 1) if folder.exists()]
        expect(not written, f"ranks {written} wrote weights too, where all pods share one volume of them")


CHECKS: Sequence[Check] = (
    says_who_it_is_and_where_it_stands,
    lets_its_group_use_the_socket,
    can_be_asked_twice_for_each_move,
    trains_a_step_once_and_answers_it_again,
    trains_once_what_is_asked_twice_at_once,
    answers_its_state_during_a_step,
    makes_progress_in_a_step,
    refuses_a_step_that_is_not_next,
    does_no_work_while_offloaded,
    changes_nothing_for_a_request_that_makes_no_sense,
    ignores_what_it_does_not_know_in_a_request,
    exports_what_is_whole_named_and_readable,
    exports_the_same_weights_in_every_pod,
    changes_its_weights_by_training,
    trains_a_batch_that_leaves_ranks_without_a_sample,
    writes_an_export_once,
    replaces_a_torn_export,
    refuses_to_export_other_weights,
    saves_while_offloaded,
    outlives_a_checkpoint_that_it_cannot_write,
    leaves_an_export_as_the_model_if_it_says_so,
    goes_on_from_its_checkpoint_when_it_is_killed,  # ends the ranks
    has_rank_0_write_alone_where_pods_share_the_weights,
)

SCORING: Sequence[Check] = (scores_a_batch_before_it_trains_it, refuses_to_score_what_is_not_next_or_while_offloaded)


def checks_of(kind: TrainerKind) -> Sequence[Check]:
    """Return the checks for this kind, with those of scoring if it has a reference. Those that end ranks are last."""
    return (*CHECKS[:-2], *SCORING, *CHECKS[-2:]) if kind.has_reference else CHECKS


# ------------------------------------------------------------------------------------------------------------- batches
def batch(trainer: TrainerGroup, step: int, *, all_for_the_last: bool = False) -> list[Path]:
    """Write shards of random tokens of the model's vocabulary, the same ones for the same step.

    all_for_the_last: the last rank gets all samples.
    """
    file = trainer.kind.model / "config.json"
    config = json.loads(file.read_bytes()) if file.exists() else {}
    vocabulary = (config.get("text_config") or config).get("vocab_size", 32)
    chance = random.Random(step)
    samples = []
    for number in range(GROUPS * GROUP_SIZE):
        prompt, response = ([chance.randrange(vocabulary) for _ in range(length)] for length in (4, 2 + number % 5))
        reward, group = float(number % 3 == 0), number // GROUP_SIZE
        samples.append(Example(prompt, response, [-3.0] * len(response), reward, group, step - 1))
    split = [trainer.size - 1] * len(samples) if all_for_the_last else trainer.size
    return write_shards(trainer.folder, samples, step=step, split=split)


def train_next(trainer: TrainerGroup) -> int:
    """Train the next step and return its number."""
    step, files = _next_batch(trainer)
    trainer.train(step, files)
    return step


def _next_batch(trainer: TrainerGroup) -> tuple[int, list[Path]]:
    step = _step_of(trainer) + 1
    return step, batch(trainer, step)


def _step_of(trainer: TrainerGroup) -> int:
    step = trainer.ranks[0].status.step
    if step is None:
        raise Broken("rank 0 has loaded, and its step is null")
    return step


def _steps(statuses: Sequence[TrainerStatus]) -> list[int | None]:
    return [status.step for status in statuses]


def _code(ask: Callable[[], TrainerStatus]) -> int:
    try:
        ask()
    except UnexpectedStatus as refusal:
        return refusal.code
    return 200


def _expect_conflict(trainer: TrainerGroup, what: str, ask: Callable[[], TrainerStatus]) -> None:
    try:
        ask()
    except UnexpectedStatus as refusal:
        expect(refusal.code == 409, f"{what} is answered {refusal.code}, not 409")
        return
    raise Broken(f"{what} is not refused")


def _digests(folder: Path) -> dict[str, Digest]:
    return Manifest.model_validate_json((folder / MANIFEST).read_bytes()).digests


def _distance(export: Path, other: Path) -> float:
    """Return the distance between the weights of two exports of one trainer."""
    return math.dist(*([*_some_weights(folder)] for folder in (export, other)))


def _some_weights(folder: Path) -> Iterator[float]:
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            header, begin = read_header(stream), stream.tell()
            for name in sorted(header.keys() - {"__metadata__"}):
                if form := _FORMATS.get(header[name]["dtype"]):
                    start, end = header[name]["data_offsets"]
                    stream.seek(begin + start)
                    wide = struct.calcsize(f"<{form}")
                    raw = stream.read(min(end - start, wide * COMPARED_OF_A_TENSOR))
                    if form == "H":  # the upper half of a float32
                        form, raw = "f", b"".join(b"\0\0" + raw[place : place + 2] for place in range(0, len(raw), 2))
                    yield from (number for (number,) in struct.iter_unpack(f"<{form}", raw))


def _end_by_signal(trainer: TrainerGroup) -> None:
    for number, rank in enumerate(trainer.ranks):
        try:
            rank.end(signal.SIGTERM, within_s=PROMPT_END_S)
        except TimeoutError as error:
            raise Broken(f"rank {number} still runs {PROMPT_END_S:.0f} s after SIGTERM") from error
