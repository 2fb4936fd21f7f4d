"""Time until trainers that were lost have their state again, by arithmetic from rates: the table of docs/sizing.md.

`python -m bench.restart` writes it again, by the rates below; `make bench-trainer` prints it by the rate that it has
measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PAGE = Path("docs/sizing.md")
HEAD = "| | bytes | 7B, 1 pod | 32B, 4 pods | 70B, 8 pods |"
SHAPES = ((7e9, 1), (32e9, 4), (70e9, 8))  # parameters, pods
RANKS = 8  # of a pod
STATE, MODEL = 12, 2  # bytes of a parameter: in float32 with two moments, and in bfloat16
GIB, GB = 2**30, 1e9


@dataclass(frozen=True)
class RestartRates:
    """Bytes a second. storage: that one pod reads while all do, an assumption. core: that one core converts, writes and
    hashes, as `make bench-trainer` has measured it.
    """

    storage: float = 2 * GB
    core: float = 2.0 * GIB


def seconds(parameters: float, pods: int, rates: RestartRates) -> tuple[float, float, float]:
    """Return the seconds of the checkpoint, of the model and of the export into the memory of each pod."""
    from_storage = [parameters * each / (pods * rates.storage) for each in (STATE, MODEL)]
    return from_storage[0], from_storage[1], parameters * MODEL / (RANKS * rates.core)


def table(rates: RestartRates) -> str:
    """Return the table, in Markdown."""
    took = [seconds(*shape, rates) for shape in SHAPES]
    rows = (
        ("verify and read the checkpoint, each pod its part", "12 P", STATE),
        ("read the model, each rank its part", "2 P", MODEL),
        (f"export into each pod's memory, by its {RANKS} ranks", "2 P in each pod", MODEL),
    )
    lines = [HEAD, "|" + "---|" * (HEAD.count("|") - 1)]
    for place, (what, size, each) in enumerate(rows):
        cells = [
            f"{parameters * each / GB:.0f} GB: {of[place]:.0f} s"
            for (parameters, _), of in zip(SHAPES, took, strict=True)
        ]
        lines.append(f"| {' | '.join([what, size, *cells])} |")
    return "\n".join([*lines, f"| together | | {' | '.join(f'{sum(of):.0f} s' for of in took)} |"])


def main() -> None:
    before, _, after = PAGE.read_text().partition(HEAD)
    PAGE.write_text(before + table(RestartRates()) + after[after.index("\n\n") :])


if __name__ == "__main__":
    main()
