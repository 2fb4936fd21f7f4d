"""Text that others wrote is shown on a terminal, and does nothing there."""

from __future__ import annotations

import io
import re
import tarfile
from pathlib import Path

import pytest
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

import colocated_rl_cli
from colocated_rl_api import names
from colocated_rl_api.facts import Problem
from colocated_rl_api.rungs import Rung
from colocated_rl_cli.__main__ import run
from colocated_rl_cli.base.output import print_error, print_out, row_of, table
from colocated_rl_cli.cluster.samples import listed, listed_one
from colocated_rl_cli.draw.timeline import page
from colocated_rl_cli.draw.view import frame
from colocated_rl_cli.evidence.records import read_line
from colocated_rl_cli.live import Terminal
from colocated_rl_cli.support.bundle import Bundle

ATTACKS = {
    "colours": "\x1b[31mred\x1b[0m",
    "title": "\x1b]0;title\x07",
    "clipboard": "\x1b]52;c;cm0gLXJm\x1b\\",
    "one byte CSI": "\x9b2J",
    "return": "all is well\rX",
    "backspaces": "rm\b\bls",
    "delete": "a\x7fb",
    "override": "abc\u202edcba\u202c",
    "isolate": "abc\u2066cba\u2069",
    "mark": "a\u200f\u061cb",
    "line": "a\u2028b\u2029c\x85d\x0be\x0cf",
    "half a character": "a\ud800b",
}
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
every_attack = pytest.mark.parametrize("text", ATTACKS.values(), ids=ATTACKS.keys())


def row(text: str) -> dict[str, object]:
    kept = {"id": 1, "group_id": 1, "state": "sealed", "reward": 1.0, "finish": "stop", "attempts": 1, "step": 1}
    return {**kept, "reason": text, "prompt": text, "response": text}


@every_attack
@pytest.mark.parametrize("form", ["text", "json", "yaml"])
def test_text_of_a_sample_does_nothing_in_any_form(text: str, form: str, capsys: pytest.CaptureFixture[str]) -> None:
    for is_terminal in (True, False):
        print_out(listed([row(text)], form, text=is_terminal))
        print_out(listed_one(row(text), form, text=is_terminal))
        print_error(text)
    shown = capsys.readouterr()
    assert [] == OBEYED.findall(shown.out + shown.err)


@every_attack
def test_a_live_view_shows_what_others_wrote_and_obeys_none_of_it(text: str) -> None:
    grid = Table()
    grid.add_row(text, Text(text, style="bold"))
    terminal = Terminal(file=io.StringIO(), width=200, force_terminal=False)
    terminal.print(Panel(grid, title=Text(text)), text, markup=False)
    shown = terminal.file
    assert isinstance(shown, io.StringIO)
    assert [] == OBEYED.findall(shown.getvalue())


@pytest.mark.parametrize("name", ["[link=https://attacker.example]sums-gpu-0-0[/link]", "[/]", "[red]sums"])
def test_a_live_view_obeys_no_markup_in_a_name(name: str) -> None:
    """Names come from logs: one became a link behind another's words, and another ended the command."""
    line = {"ts": 1.0, "event": "rung reached", "rung": Rung.SERVING, "role": names.ROLE_GPU, "pod": name}
    terminal = Terminal(file=io.StringIO(), width=200, force_terminal=True)
    terminal.print(frame({"spec": {"steps": 1}}, [line], now=2.0))
    shown = terminal.file
    assert isinstance(shown, io.StringIO)
    assert name in shown.getvalue()


@pytest.mark.parametrize("line", ['{"ts": 1, "event": ' + "[" * 100_000, '{"ts": ' + "1" * 5000 + "}"])
def test_a_line_of_a_log_that_python_can_not_read_is_other_output(line: str) -> None:
    assert read_line(line) is None


@every_attack
def test_files_for_people_hold_nothing_that_a_terminal_obeys(text: str, tmp_path: Path) -> None:
    """Whoever gets a support archive may show a log of it with `cat`."""
    made = Bundle("sums-bundle")
    made.text("pods/a/rewards.log", f"{text}\n")
    made.document("job.yaml", {"status": {text: text}})
    made.document("state.json", {text: text})
    made.write(str(tmp_path / "bundle.tar.gz"))
    with tarfile.open(tmp_path / "bundle.tar.gz") as archive:
        files = [file.read().decode() for each in archive if (file := archive.extractfile(each)) is not None]
    assert 3 == len(files)
    assert [] == OBEYED.findall("".join(files) + page(text, [f"<p>{text}</p>"]))


@every_attack
def test_an_argument_comes_back_in_an_error_without_acting(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert 2 == run(["explain", f"job{text}"], {})
    shown = capsys.readouterr()
    assert "is no name of a job" in shown.err
    assert [] == OBEYED.findall(shown.err)


@every_attack
def test_a_problem_holds_one_line_of_text(text: str) -> None:
    problem = Problem(reason="EngineLost", message=f"{text}\n\tsaid:")
    assert [] == OBEYED.findall(problem.message)
    assert problem.message.endswith("  said:")
    assert problem == Problem.model_validate_json(problem.model_dump_json())


def test_a_value_can_not_add_a_row_to_a_table() -> None:
    assert 2 == len(table([{"state": "a\nb"}], ["state"]).splitlines())
    assert 1 == len(row_of({"state": "a\nb"}, {"state": 3}).splitlines())


def test_what_people_write_stays(capsys: pytest.CaptureFixture[str]) -> None:
    words = "\u05d0\u05d1\u05d2 \u4e2d\u6587 \N{GRINNING FACE} e\u0301"
    print_out(f"tabs\tand\nlines, {words}")
    assert f"tabs\tand\nlines, {words}\n" == capsys.readouterr().out
    assert words == Problem(reason="EngineLost", message=words).message


def test_nothing_is_printed_by_another_way() -> None:
    ways = re.compile(r"sys\.std(out|err)\.write|click\.echo|Console\(\)|\.show\(\)")
    root = Path(colocated_rl_cli.__file__).parent
    files = [file for file in root.rglob("*.py") if ways.search(file.read_text())]
    own = {"base/output.py", "document.py"}  # the second writes a page of ours, for its authors
    assert own == {str(file.relative_to(root)) for file in files}
