"""Compute how soon a job could be done by a scheduler that knows every length in advance. Uses no code of the worker.

Time passes in rollout, in switches and in training. The last two are fixed: one switch a step, and every sample is
trained once. What is left to choose is how long the gates are open before each step, and who gets how many tokens
then; the shortest sum is a linear program, which HiGHS solves. It is of all schedules that train the prompts in their
order, as a job without a bias for short answers does on the average. Of each of them it holds that

* the batch of step k is generated in phases k - 1 - maxStaleness to k - 1;
* a sample gets one token at a time, and no faster than alone on an engine;
* so many requests get so many tokens per second, however they are spread: the rate of an engine is concave in its
  requests. In a phase there are no more than the slots of all engines, nor than the samples of the batches that may
  be generated then;
* each prompt is prefilled once, and nothing is decoded meanwhile. What a sample has when a phase ends is prefilled
  again in the next one that gives it tokens; who needs several phases at least is known from its length and the
  longest phase, and the rest can be avoided by whoever lets a phase drain.

Samples of like length are one class of the program, the longest ones alone: a sum of constraints allows more than
each of them, so what comes out is no longer than the best there is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from bench.simulated_engines import PROMPT_TOKENS
from bench.simulated_job import SimulatedJob

ALONE = 4  # of the longest samples of a batch, each a class of its own
CLASSES = 8  # of the others


@dataclass(frozen=True)
class Class:
    """Samples of one batch. step: from 0."""

    step: int
    samples: int
    tokens: int


def least_s(job: SimulatedJob) -> float:
    """Seconds that the whole job takes at least."""
    return job.steps * job.switch_s + job.tokens * job.train_s + least_rollout_s(job)


def least_rollout_s(job: SimulatedJob) -> float:
    """Return the seconds with gates open. Variables: the length of each phase, and what each class gets in it."""
    from scipy.optimize import linprog  # takes a second
    from scipy.sparse import lil_matrix

    steps, rates = job.steps, job.rates
    prefill_s = steps * job.samples * PROMPT_TOKENS / (rates.prefill * job.engines)
    classes = list(classes_of(job))
    parts = [
        (number, phase)
        for number, each in enumerate(classes)
        for phase in range(max(0, each.step - job.max_staleness), each.step + 1)
    ]
    size = steps + len(parts)
    at_most, equal = lil_matrix((steps + len(parts), size)), lil_matrix((len(classes), size))
    for phase in range(steps):
        batches = min(job.max_staleness + 1, steps - phase)
        requests = min(job.engines * rates.slots, batches * job.samples)
        at_most[phase, phase] = -job.engines * rates.throughput(requests / job.engines)
    for place, (number, phase) in enumerate(parts):
        at_most[phase, steps + place] = 1.0
        at_most[steps + place, steps + place] = rates.token_s(1)
        at_most[steps + place, phase] = -classes[number].samples
        equal[number, steps + place] = 1.0
    cost = np.zeros(size)
    cost[:steps] = 1.0
    found = linprog(
        cost,
        A_ub=at_most.tocsr(),
        b_ub=np.zeros(steps + len(parts)),
        A_eq=equal.tocsr(),
        b_eq=np.array([each.tokens for each in classes], float),
        method="highs",
    )
    if not found.success:
        raise RuntimeError(f"the bound was not found: {found.message}")
    return prefill_s + float(found.fun)


def classes_of(job: SimulatedJob) -> Iterator[Class]:
    for step in range(job.steps):
        prompts = range(step * job.batch_size, (step + 1) * job.batch_size)
        lengths = sorted(job.trace(prompt, number) for prompt in prompts for number in range(job.group_size))
        rest = max(0, len(lengths) - ALONE)
        ends = sorted(
            {round(rest * share / CLASSES) for share in range(CLASSES + 1)} | set(range(rest, len(lengths) + 1))
        )
        for start, end in pairwise(ends):
            yield Class(step, end - start, sum(lengths[start:end]))
