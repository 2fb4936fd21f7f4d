"""Run every check and print its result: `python3 -m colocated_rl_trainer.conformance --model DIR -- COMMAND ...`.

Exit code 0 if all held, 1 if one did not, 2 if the trainer did not load.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from colocated_rl_trainer.conformance.checks import Broken, Check, checks_of
from colocated_rl_trainer.conformance.ranks import RankLost, TrainerGroup, TrainerKind, UnexpectedStatus

HELD, BROKEN, NOT_LOADED = 0, 1, 2
FAILED = 500  # status of a rank that ends after its answer
LAST_LINES = 5  # of each rank's output, after a failure


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    kind = TrainerKind("yours", options.command, options.model, options.config, has_reference=options.reference)
    checks = checks_of(kind)
    with tempfile.TemporaryDirectory(prefix="conformance-") as scratch, contextlib.ExitStack() as stack:
        try:
            trainer = stack.enter_context(TrainerGroup(kind, Path(scratch), size=options.ranks, device=options.device))
            trainer.wait_loaded()
            if options.reference and not all(rank.status.can_score for rank in trainer.ranks):
                _print("BROKEN  `canScore` is false: in a job with a reference this trainer is refused")
                return BROKEN
            trainer.onload()
        except (RankLost, UnexpectedStatus, OSError, ValueError) as error:
            _print(f"the trainer did not load: {error}")
            return NOT_LOADED
        held = 0
        try:
            for check in checks:
                held += _holds(trainer, check)
        except _RankEnded:
            _print("a rank has ended: the other checks need it, and were not made")
        if held < len(checks):
            for line in _last_output(trainer):
                _print(line)
    _print(f"{held} of {len(checks)} checks held")
    return HELD if held == len(checks) else BROKEN


class _RankEnded(Exception):
    """No further check can be made."""


def _holds(trainer: TrainerGroup, check: Check) -> bool:
    """Run one check and print its result. Raises _RankEnded."""
    name = check.__name__.replace("_", " ")
    try:
        check(trainer)
    except Broken as error:
        _print(f"BROKEN  {name}: {error}")
    except (
        RankLost,
        UnexpectedStatus,
        OSError,
        ValueError,
    ) as error:  # an answer that can't be read breaks the protocol
        _print(f"BROKEN  {name}: {type(error).__name__}: {error}")
        if isinstance(error, ConnectionError) or (isinstance(error, UnexpectedStatus) and error.code == FAILED):
            raise _RankEnded from error
    else:
        _print(f"held    {name}")
        return True
    return False


def _last_output(trainer: TrainerGroup) -> Iterator[str]:
    for number, rank in enumerate(trainer.ranks):
        yield f"last output of rank {number}:"
        yield from (f"    {line}" for line in rank.log.read_text(errors="replace").splitlines()[-LAST_LINES:])


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python3 -m colocated_rl_trainer.conformance", description=__doc__)
    parser.add_argument(
        "--model", type=_directory, required=True, help="directory of a small model, Hugging Face format"
    )
    parser.add_argument("--config", type=_object, default={}, help="JSON file: what spec.trainer.config would be")
    parser.add_argument("--ranks", type=_count, default=2, help="of the group, each as in a pod of its own (2)")
    parser.add_argument("--reference", action="store_true", help="as in a job with spec.reference: it has to score")
    parser.add_argument(
        "--device", default="cpu", help="of all ranks: cpu or cuda:N (cpu); NCCL takes one rank on a device: --ranks 1"
    )
    parser.add_argument("command", nargs="+", help="the trainer, after --: what spec.trainer.command would be")
    return parser.parse_args(arguments)


def _directory(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"there is no directory {text}")
    return Path(text).resolve()


def _object(text: str) -> dict[str, Any]:
    try:
        config = json.loads(Path(text).read_bytes())
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text} can't be read: {error}") from error
    if not isinstance(config, dict):
        raise argparse.ArgumentTypeError(f"{text} has no JSON object")
    return config


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text} is no number of ranks: 1 at least")
    return int(text)


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
