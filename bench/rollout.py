"""`make bench-rollout`: how long a step of a job takes, beside a synchronous loop, beside starting over what a switch
cut off, and beside what could be reached at best; and what resuming costs.

Whole jobs in virtual time, from the first prompt to the last step: the real worker, store, admission, order, staleness
and sealing (`simulated_job`) over engines with stated rates (`simulated_engines`), answers as long as in `traces`, and
a bound by an independent solver (`rollout_bound`). All train the same samples. Nothing is generated while gates are
closed, so one run stands for every time of switch and training: how long training takes is stated as a share of the
synchronous loop's rollout.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from bench.rollout_bound import least_rollout_s
from bench.simulated_engines import PROMPT_TOKENS, Rates
from bench.simulated_job import SimulatedJob, SimulatedOutcome, apart, colocated, synchronous
from bench.traces import near_uniform, reasoning
from colocated_rl_api.job import Interruption
from colocated_rl_rollout.store.store import Store

TRACES = {"reasoning": reasoning, "near-uniform": near_uniform}
STALENESS = (0, 1, 2, 3, 4)
RETRIED = 1  # staleness of the job that starts over
CASES = [(training, switch_s) for training in (0.25, 1.0) for switch_s in (5.0, 30.0)]
STEP_GROUPS, GROUPS = (8, 16, 32, 64, 128), 1024  # of a step, and of a job, where the length of a step is varied
SOAK_STEPS = 196  # of 512 samples: 100,352


class Table:
    """A table of one trace shows what each way to run the job takes."""

    def __init__(self, job: SimulatedJob, loop: SimulatedOutcome) -> None:
        self._job = job
        self._loop = loop

    def head(self) -> str:
        cases = "".join(f"  train {training:4.2f} switch {switch_s:2.0f} s    " for training, switch_s in CASES)
        return f"{'':34}  staleness  open s  resent  lost    {cases}\n{'':68}" + "  s/step  gain  bound    " * len(
            CASES
        )

    def line(self, name: str, outcome: SimulatedOutcome, least_s: float) -> str:
        tokens, steps = outcome.trained_tokens, self._job.steps
        figures = [
            f"{name:34}  {outcome.staleness_mean:9.2f}  {outcome.rollout_s / steps:6.1f}"
            f"  {outcome.resent_tokens / tokens:6.2f}  {outcome.discarded_tokens / tokens:4.2f}    "
        ]
        for training, switch_s in CASES:
            fixed_s = steps * switch_s + training * self._loop.rollout_s
            took_s, at_best_s = fixed_s + outcome.rollout_s, fixed_s + least_s
            gain = (fixed_s + self._loop.rollout_s) / took_s
            figures.append(f"  {took_s / steps:6.1f}  {gain:4.2f}  {at_best_s / took_s:5.3f}    ")
        return "".join(figures)


def compare(name: str, job: SimulatedJob, say: Callable[[str], None]) -> None:
    lengths = sorted(job.trace(prompt, number) for prompt in range(200) for number in range(job.group_size))
    full_s = job.tokens / job.engines / job.rates.throughput(job.rates.slots)
    prefill_s = job.steps * job.samples * PROMPT_TOKENS / job.rates.prefill / job.engines
    say(
        f"\n{name}: {job.tokens / job.steps / job.samples:.0f} tokens a sample, the longest of a step's {job.samples} "
        f"about {lengths[-len(lengths) // job.samples]}; engines that are never short of work need "
        f"{(full_s + prefill_s) / job.steps:.1f} s a step"
    )
    loop = synchronous(job)
    table = Table(job, loop)
    say(table.head())
    say(table.line("synchronous", loop, least_rollout_s(replace(job, max_staleness=0))))
    retried = replace(job, max_staleness=RETRIED, interruption=Interruption.RETRY)
    say(table.line(f"aborted and retried, maxStaleness {RETRIED}", colocated(retried), least_rollout_s(retried)))
    for staleness in STALENESS:
        resumed = replace(job, max_staleness=staleness)
        say(table.line(f"this, maxStaleness {staleness}", colocated(resumed), least_rollout_s(resumed)))


def resent(job: SimulatedJob, say: Callable[[str], None]) -> None:
    """Print how much is prefilled again, by the length of a step."""
    say(
        "\nreasoning, maxStaleness 2: groups of a step, seconds with gates open, tokens prefilled again per trained one"
    )
    for groups in STEP_GROUPS:
        outcome = colocated(replace(job, max_staleness=2, batch_size=groups, steps=GROUPS // groups))
        share = outcome.resent_tokens / outcome.trained_tokens
        say(f"  {groups:4}  {outcome.rollout_s / len(outcome.phases_s):7.1f} s  {share:6.3f}")


def in_turns(job: SimulatedJob, say: Callable[[str], None]) -> None:
    """Print what it would bring that engines on devices of their own load new weights one after the other."""
    say(
        f"\nreasoning, {job.engines} engines on devices of their own, which load new weights together or in turns:\n"
        "s/step and staleness of each, and speed of the second, that of the first = 1"
    )
    loop = synchronous(job)
    for staleness, training, load_s in itertools.product((1, 2), (0.25, 1.0), (5.0, 15.0)):
        train_s = training * loop.rollout_s / loop.trained_tokens
        placed = replace(job, max_staleness=staleness, train_s=train_s, switch_s=load_s)
        together, one_by_one = apart(placed, in_turns=False), apart(placed, in_turns=True)
        figures = [f"{each.took_s / job.steps:6.1f} {each.staleness_mean:5.2f}" for each in (together, one_by_one)]
        case = f"maxStaleness {staleness}, train {training:4.2f}, load {load_s:2.0f} s"
        say(f"  {case}  {'   '.join(figures)}   {together.took_s / one_by_one.took_s:5.3f}")


def held(job: SimulatedJob, *, settle: Callable[[Store], None] = lambda _: None) -> list[tuple[int, int]]:
    """Memory of this process and the store's files after each step, KiB. settle: called before each is measured."""
    seen: list[tuple[int, int]] = []

    def watch(store: Store) -> None:
        settle(store)
        resident = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")
        seen.append((resident >> 10, sum(path.stat().st_size for path in store.path.parent.glob("store*")) >> 10))

    colocated(job, watch=watch)
    return seen


def soak(job: SimulatedJob, say: Callable[[str], None]) -> None:
    """Print what is held in memory while many short samples go through."""
    began = time.process_time()
    seen = held(job)
    cpu_s, fifth = time.process_time() - began, len(seen) // 5
    say(
        f"\n{job.steps * job.samples} samples of {job.tokens / job.steps / job.samples:.0f} tokens, maxStaleness "
        f"{job.max_staleness}: {1e3 * cpu_s / job.steps / job.samples:.2f} s of CPU for 1,000, simulation included;\n"
        f"after a fifth {seen[fifth][0] >> 10} MiB and a store of {seen[fifth][1]} KiB, at the end "
        f"{seen[-1][0] >> 10} MiB and {seen[-1][1]} KiB"
    )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.rollout", description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    steps = parser.parse_args(arguments).steps
    began, rates = time.monotonic(), Rates()
    job = SimulatedJob(reasoning, steps=steps)
    print(
        f"{steps} steps of {job.batch_size} groups of {job.group_size}, maxConcurrency (maxStaleness + 1) * batchSize; "
        f"{job.engines} engines of {rates.slots}\nslots, {1e3 * rates.base_s:.0f} ms + {1e6 * rates.each_s:.0f} us for "
        f"each request a token, {rates.prefill:.0f} tokens/s of prefill, prompts of {PROMPT_TOKENS}.\n"
        "staleness: of a trained token, mean. open s: gates open, a step. resent: tokens prefilled again, lost:\n"
        "generated and not trained, each for one trained. gain: over synchronous. bound: the least time that any\n"
        "schedule in the prompts' order takes, over this one's."
    )
    for name, trace in TRACES.items():
        compare(name, replace(job, trace=trace), lambda line: print(line, flush=True))
    resent(job, lambda line: print(line, flush=True))
    in_turns(job, lambda line: print(line, flush=True))
    few = SimulatedJob(
        lambda prompt, number: 1 + reasoning(prompt, number) // 200, SOAK_STEPS, 64, 8, engines=8, max_staleness=2
    )
    soak(few, lambda line: print(line, flush=True))
    print(f"\n{time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
