"""One name, one meaning: a reader who greps for a class finds one. A docstring is a sentence, not the end of one.

A log event is a noun and what happened to it.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FRAGMENT = re.compile(
    "(Of|What|Whether|Where|How|That|Which|Who|Whose|Why|Until|Before|Without|As|By|Those|Also|So|And|Or|But)[, ]"
    "|[a-z_]+: "  # of a parameter alone
)
NOT_A_VERB = re.compile("[^A-Z]|(The|A|An|One|This|It|Its|No|None|All|Each|Every|True|False|Raises|In|Say|Tell) ")
HAPPENED = re.compile(
    r"\w+(ed|en|ing)|begun|found|full|gone|kept|left|lost|made|read|ready|sent|shut|unreadable|unusable"
)
CLASS = re.compile(r"^ *class (\w+)[:(\[]", re.MULTILINE)
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def classes() -> dict[str, list[str]]:
    """Return where the repository defines each class, by its name: searched as text, which takes a tenth of parsing."""
    found: dict[str, list[str]] = defaultdict(list)
    for folder in ("operator", "workloads", "tests", "bench", "examples"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            for name in CLASS.findall(file.read_text(encoding="utf-8")):
                found[name].append(str(file.relative_to(ROOT)))
    return found


@cache
def sources(folder: str) -> list[tuple[Path, ast.Module]]:
    files = sorted((ROOT / folder).glob("**/colocated_rl_*/**/*.py"))
    return [(file, ast.parse(file.read_text(encoding="utf-8"))) for file in files]


def docstrings(folder: str) -> Iterator[tuple[str, str, bool]]:
    """Yield the place of each docstring, its text, and whether it is a function's."""
    for file, tree in sources(folder):
        for node in ast.walk(tree):
            if isinstance(node, Documented) and (text := ast.get_docstring(node)) is not None:
                is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                yield f"{file.relative_to(ROOT)}:{node.body[0].lineno}", text, is_function


def events(folder: str) -> Iterator[tuple[str, str]]:
    """Yield the place of each call of `log` that names its event, and the event."""
    for file, tree in sources(folder):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "log":
                for argument in node.args[:2]:
                    if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                        yield f"{file.relative_to(ROOT)}:{node.lineno}", argument.value


def test_no_two_classes_of_the_repository_have_one_name() -> None:
    found = classes()

    assert len(found) > 900, "the classes were not found"
    assert {} == {name: places for name, places in found.items() if len(places) > 1}


def test_a_docstring_is_a_sentence_and_that_of_a_function_begins_with_what_it_does() -> None:
    found = [*docstrings("operator"), *docstrings("workloads")]

    assert len(found) > 1500, "the product's docstrings were not found"
    assert [] == [
        f"{place} {text.splitlines()[0]}"
        for place, text, is_function in found
        if FRAGMENT.match(text) or (is_function and NOT_A_VERB.match(text))
    ]


def test_a_docstring_of_tests_benchmarks_and_examples_is_a_sentence() -> None:
    """These files are searched as text: to parse all of them would take a second more."""
    beginning = re.compile(r'^ *"""(.*)', re.MULTILINE)
    files = [file for folder in ("tests", "bench", "examples") for file in sorted((ROOT / folder).rglob("*.py"))]
    found = [(file, text) for file in files for text in beginning.findall(file.read_text(encoding="utf-8"))]

    assert len(found) > 1500, "the docstrings of tests were not found"
    assert [] == [f"{file.relative_to(ROOT)} {text}" for file, text in found if FRAGMENT.match(text)]


def test_an_event_of_the_log_is_a_noun_and_what_happened_to_it() -> None:
    found = [*events("operator"), *events("workloads")]

    assert len(found) > 100, "the events were not found"
    assert [] == [
        (place, event) for place, event in found
        if ":" in event or len(words := event.split()) < 2 or not any(map(HAPPENED.fullmatch, words[1:]))
    ]  # fmt: skip
