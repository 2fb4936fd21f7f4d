"""A hundred thousand samples through worker and store, in a process of their own: what is held does not grow."""

from __future__ import annotations

import ctypes
import multiprocessing
import sqlite3
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing

import pytest

from bench.rollout import held
from bench.simulated_engines import Rates
from bench.simulated_job import SimulatedJob
from bench.traces import brief
from colocated_rl_rollout.store.store import Store

JOB = SimulatedJob(brief, steps=98, batch_size=64, group_size=16, engines=2, rates=Rates(slots=1024))
GROWTH_KIB = 6 * 1024  # of a process of some 90 MiB: 75 bytes for each sample


def settle(store: Store) -> None:
    """Leave neither writes under way, nor their log, nor memory that the C library keeps: a busy disk decides those."""
    store._writer.flush(deadline_s=300)
    with closing(sqlite3.connect(store.path)) as database:
        assert database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0
    ctypes.CDLL(None).malloc_trim(0)


@pytest.mark.release  # a minute beside other tests
def test_a_hundred_thousand_samples_leave_no_more_than_the_first_twenty_thousand() -> None:
    """Twenty-odd seconds: most of it is what engines and clock are simulated with."""
    assert 100_000 <= JOB.steps * JOB.samples
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        resident_kib, store_kib = zip(*process.submit(held, JOB, settle=settle).result(), strict=True)
    fifth = JOB.steps // 5
    assert resident_kib[-1] - resident_kib[fifth] <= GROWTH_KIB
    assert max(store_kib[fifth:]) <= 1.25 * store_kib[fifth]
