"""Judge what switches on one device showed, and write it down. Pure.

* Nothing was replaced: engine and trainer are the same processes from the first switch to the last.
* Of what a side took of the device when its turn began, it gave back at least FREED_SHARE when its turn ended.
* What is in use while neither side has the device, the residue, grows by less than SLOPE_BYTES a switch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean, median

from colocated_rl_agent.runner.devices import FREED_SHARE

MIB, GIB = 2**20, 2**30
SLOPE_BYTES = MIB  # a switch
WARM_UP = 2  # switches whose residue still grows: kernels are loaded with their first use
LEAST = 3  # switches after those, for a slope
HEADING, MODEL = "## Switches on one GPU", "\n\n### "  # of the page's section, and of a model in it


@dataclass(frozen=True)
class MeasuredSwitch:
    """A switch: bytes in use on the device at its moments, in their order, and what took how long.

    processes: the engine's and the trainer's incarnations, as they serve again.
    """

    serving: int  # the engine before it releases
    released: int  # neither side
    trained: int  # the trainer before it offloads
    offloaded: int  # neither side: the residue
    served_again: int  # the engine
    took_s: float
    step_s: float  # of the training step
    tokens: int  # of the step
    processes: tuple[str | None, str | None]

    def freed_by_trainer(self) -> float | None:
        return _share(self.trained - self.offloaded, self.trained - self.released)


@dataclass(frozen=True)
class Proof:
    """A proof is what the switches of one model showed.

    flops: of the model for one token of a training step. peak_flops: a second, of a large product of matrices on the
    device. ended: why there are fewer switches than were asked for; None: there are not.
    """

    name: str
    asked: int
    switches: tuple[MeasuredSwitch, ...]
    flops: float
    peak_flops: float
    released_by: str
    ended: str | None = None
    problems: tuple[str, ...] = ()  # that the pod reported

    @property
    def freed_by_engine(self) -> list[float]:
        """Return the share of each release: of what the engine took when it was let in, the first time after it."""
        shares = []
        for switch, former in zip(self.switches, [None, *self.switches], strict=False):
            taken = switch.serving - former.offloaded if former else switch.served_again - switch.offloaded
            shares.append(_share(switch.serving - switch.released, taken))
        return [share for share in shares if share is not None]

    @property
    def freed_by_trainer(self) -> list[float]:
        return [share for switch in self.switches if (share := switch.freed_by_trainer()) is not None]

    @property
    def slope(self) -> float | None:
        """Return the residue's growth in bytes a switch, by least squares; None: there are too few switches."""
        residues = [switch.offloaded for switch in self.switches[WARM_UP:]]
        if len(residues) < LEAST:
            return None
        middle, mean = (len(residues) - 1) / 2, fmean(residues)
        spread = sum((place - middle) ** 2 for place in range(len(residues)))
        return sum((place - middle) * (residue - mean) for place, residue in enumerate(residues)) / spread

    @property
    def tokens_per_s(self) -> float:
        """Return the median of the steps, the first of which compiles and tunes."""
        return median(switch.tokens / switch.step_s for switch in self.switches[1:] or self.switches)

    @property
    def share_of_peak(self) -> float:
        return self.flops * self.tokens_per_s / self.peak_flops

    def shortfalls(self) -> Iterator[str]:
        """Yield what does not hold, in words."""
        if self.ended is not None or len(self.switches) < self.asked:
            yield f"ended after {len(self.switches)} of {self.asked} switches: {self.ended}"
        if len({switch.processes for switch in self.switches}) > 1:
            yield "a process was replaced"
        if self.problems:
            yield f"the pod reported {'; '.join(self.problems)}"
        for side, shares in (("engine", self.freed_by_engine), ("trainer", self.freed_by_trainer)):
            if len(shares) < len(self.switches):
                yield f"{len(self.switches) - len(shares)} times the {side} took nothing of the device"
            if shares and min(shares) < FREED_SHARE:
                yield f"the {side} gave back {min(shares):.3f} of what it took, and not {FREED_SHARE}"
        if self.slope is None:
            yield f"no slope from {len(self.switches)} switches"
        elif self.slope >= SLOPE_BYTES:
            yield f"the residue grows by {self.slope / MIB:.2f} MiB a switch"


def _share(freed: int, taken: int) -> float | None:
    return freed / taken if taken > 0 else None


def show(proof: Proof) -> Iterator[str]:
    """Yield the lines that say what the switches of a model showed."""
    if proof.switches:
        residues = [switch.offloaded for switch in proof.switches]
        took = sorted(switch.took_s for switch in proof.switches)
        freed = {"engine": proof.freed_by_engine, "trainer": proof.freed_by_trainer}
        least = ", ".join(f"{side} {min(shares):.3f}" for side, shares in freed.items() if shares)
        slope = "not known" if proof.slope is None else f"{proof.slope / MIB:+.3f} MiB"
        yield f"| switches | {len(proof.switches)} of {proof.asked} |"
        yield f"| processes replaced | {len({switch.processes for switch in proof.switches}) - 1} |"
        yield f"| least share that came free | {least} |"
        most = [_gib(max(switch.serving for switch in proof.switches)), _gib(max(s.trained for s in proof.switches))]
        yield f"| most in use with the engine, with the trainer | {', '.join(most)} |"
        yield f"| residue, first and last | {residues[0] / MIB:.0f} and {residues[-1] / MIB:.0f} MiB |"
        yield f"| its growth a switch, without the first {WARM_UP} | {slope} |"
        yield f"| a switch with its step, median and longest | {median(took):.2f} and {took[-1]:.2f} s |"
        yield f"| a step of {proof.switches[0].tokens} tokens, median | {proof.tokens_per_s:.0f} tokens/s |"
        yield f"| of the peak | {proof.share_of_peak:.3f} |"
        yield f"| the engine's memory is released by | {proof.released_by} |"
    yield f"| falls short | {'; '.join(proof.shortfalls()) or 'of nothing'} |"


def placed(page: str, proof: Proof, *, conditions: str) -> str:
    """Return the page with this proof under its heading, in place of a former one of the same model."""
    before, heading, rest = page.partition(f"{HEADING}\n")
    if not heading:
        raise ValueError(f"the page has no heading {HEADING!r}")
    inside, following, others = rest.partition("\n## ")
    introduction, *blocks = inside.rstrip("\n").split(MODEL)
    block = "\n".join([proof.name, "", conditions, "", "| | |", "|---|---|", *show(proof)])
    kept = [former for former in blocks if former.partition("\n")[0] != proof.name]
    return before + heading + MODEL.join([introduction, *kept, block]) + "\n" + following + others


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
