"""The benchmark of whole jobs runs to its end: a job of ours, and trl with the same engine."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from setup.layout import CHECKOUT

pytestmark = pytest.mark.release  # `make test-slow`

RUN_S = 900


def test_a_job_and_trl_train_as_many_samples_each() -> None:
    words = ("--steps", "2", "--only", "maxStaleness 1", "--only", "trl, by the same engine")
    done = subprocess.run(
        [sys.executable, "-m", "bench.benefit", *words], cwd=CHECKOUT.root, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": "tests"}, timeout=RUN_S, check=False,
    )  # fmt: skip
    assert 0 == done.returncode, done.stdout + done.stderr
    rows = re.findall(
        r"^(maxStaleness 1|trl, by the same engine) +(\d+) +\d+ +([\d.]+)( +[\d.]+){3}$", done.stdout, re.MULTILINE
    )
    assert [("maxStaleness 1", "128"), ("trl, by the same engine", "128")] == [row[:2] for row in rows], done.stdout
    assert 0.0 == float(rows[1][2]), "trl trains on the newest weights alone"
