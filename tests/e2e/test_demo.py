"""The demo with less to learn: its table and report; and that nothing of it stays on the machine, however it ends."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from traces import Process, family, listens, living, traces, wait_until

from colocated_rl_cli.draw.figures import read_figures
from colocated_rl_cli.evidence.records import Records
from examples.arithmetic.report import render, summary
from examples.arithmetic.verdict import shortfalls
from setup.layout import CHECKOUT

JOB = CHECKOUT.root / "examples/arithmetic/job.yaml"
STARTED_S = 600.0
GONE_S = 180.0
STEPS = 2
STEPS_S = 1200.0  # past the demo's own deadline, which then says why
POD = "arithmetic-gpu-0-0"


@pytest.fixture
def out() -> Iterator[Path]:
    """Short, as the cluster's sockets lie in it."""
    path = Path(tempfile.mkdtemp(prefix="demo-"))
    yield path
    shutil.rmtree(path)


@contextmanager
def demo(out: Path, job: Path = JOB) -> Iterator[subprocess.Popen[bytes]]:
    """Run the demo; its output is in `output.txt`."""
    with (
        (out / "output.txt").open("wb") as output,
        started(out, job, stdin=subprocess.DEVNULL, output=output.fileno()) as one,
    ):
        yield one


@contextmanager
def demo_on_a_terminal(out: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run the demo on a terminal that can be typed into; its output is in `output.txt`."""
    typed, terminal = pty.openpty()

    def write_down() -> None:
        with (out / "output.txt").open("wb", buffering=0) as output, contextlib.suppress(OSError):  # when it closes
            while text := os.read(typed, 1 << 16):
                output.write(text)

    writer = threading.Thread(target=write_down)
    writer.start()
    with started(out, JOB, "setsid", "--ctty", stdin=terminal, output=terminal) as process:
        os.close(terminal)
        yield process, typed
    writer.join()
    os.close(typed)


@contextmanager
def started(out: Path, job: Path, *by_way_of: str, stdin: int, output: int) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [*by_way_of, sys.executable, "-m", "examples.arithmetic.demo", "--out", str(out), "--job", str(job)],
        cwd=CHECKOUT.root,
        env=os.environ | {"COLUMNS": "160", "TERM": "xterm"},
        stdin=stdin,
        stdout=output,
        stderr=output,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def output_of(out: Path) -> str:
    return (out / "output.txt").read_text()


def family_at_work(out: Path, process: subprocess.Popen[bytes], *shown: str) -> set[Process]:
    """All processes of the demo, once its job's trainers are among them and it has shown these words."""

    def works() -> bool:
        assert process.poll() is None, output_of(out)
        starts = any("colocated_rl_trainer" in one.words for one in family(process.pid))
        return starts and all(words in output_of(out) for words in shown)

    wait_until("trainers start", works, deadline_s=STARTED_S, explain=lambda: output_of(out))
    assert listens(out / "cluster")
    return family(process.pid)


def assert_nothing_stays(out: Path, everyone: set[Process], before: dict[str, object]) -> None:
    wait_until(
        "nothing is left",
        lambda: not living(everyone) and traces(out) == before,
        deadline_s=GONE_S,
        explain=lambda: f"{living(everyone)}\n{traces(out)}",
    )
    assert not listens(out / "cluster")


def changed_job(out: Path, *, steps: int) -> Path:
    job = yaml.safe_load(JOB.read_text())
    job["spec"] |= {"steps": steps, "evaluation": {"everySteps": 10, "sets": [{"name": "held-out", "samples": 64}]}}
    path = out / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def test_demo_ends_with_a_table_a_report_and_what_it_falls_short_of(out: Path) -> None:
    """Two steps and 64 questions are too few for the verdict, which is how it is known to be asked."""
    before = traces(out)
    with demo(out, changed_job(out, steps=STEPS)) as process:
        assert 1 == process.wait(STEPS_S), output_of(out)
    records = Records.read(out / "records.json")
    assert "Complete" == records.job["status"]["phase"]
    figures = read_figures(records.lines)
    assert [1, 2] == [batch.step for batch in figures.batches]
    assert [0, 2] == [one.step for one in figures.evaluations]
    text = output_of(out)
    for name, value in summary(records):
        assert any(line.startswith(name) and value in line for line in text.splitlines()), f"{name} {value}\n{text}"
    for short in shortfalls(records):
        assert f"demo: {short}\n" in text
    assert "64 held-out questions were asked, fewer than 400" in text
    assert render(records) == (out / "report.html").read_text()
    assert_nothing_stays(out, set(), before)


@pytest.mark.release
def test_demo_that_is_killed_leaves_nothing(out: Path) -> None:
    before = traces(out)
    with demo(out) as process:
        everyone = family_at_work(out, process)
        process.kill()
    assert_nothing_stays(out, everyone, before)


@pytest.mark.release
def test_demo_that_is_interrupted_in_its_live_view_leaves_nothing(out: Path) -> None:
    before = traces(out)
    with demo_on_a_terminal(out) as (process, typed):
        everyone = family_at_work(out, process, "default/arithmetic", POD)  # the title of the view, and what is in it
        os.write(typed, b"\x03")  # Ctrl-C
        assert 130 == process.wait(GONE_S), output_of(out)
    assert output_of(out).splitlines()[-1].endswith("demo: interrupted")
    assert_nothing_stays(out, everyone, before)


@pytest.mark.release
def test_demo_whose_cluster_is_killed_says_so_and_leaves_nothing(out: Path) -> None:
    before = traces(out)
    with demo(out) as process:
        everyone = family_at_work(out, process, POD)  # it follows the job: that is what it is in the middle of
        os.kill(json.loads((out / "cluster/state.json").read_text())["PID"], signal.SIGKILL)
        assert 1 == process.wait(GONE_S), output_of(out)
    assert "ended with code -9 while it was in use: start again" in output_of(out)
    assert_nothing_stays(out, everyone, before)


def test_demo_whose_job_is_refused_says_why_and_leaves_nothing(out: Path) -> None:
    before = traces(out)
    with demo(out, changed_job(out, steps=0)) as process:
        assert 1 == process.wait(STARTED_S), output_of(out)
    assert "spec.steps" in output_of(out)
    assert_nothing_stays(out, set(), before)
