"""This plugin of pytest tries mutants: it imports the tests once, and forks for each mutant.

At first the tests run without a mutant, and which statements each of them ran is recorded. In a fork the functions of
the mutant's file get its code, and the tests that ran the changed statement run, up to the first that fails. What ran
while the tests were imported (a constant, a decorator, a table) can't be changed afterwards: if no test fails in the
fork of such a mutant, all tests run in a new process, which imports it. A mutant that is accepted would run every test:
it is tried in a fork alone, by the quick ones.
"""

from __future__ import annotations

import ast
import builtins
import gc
import math
import os
import pickle
import resource
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple, NoReturn

import pytest
from hypothesis import Phase, settings

from mutants.work import FILE, Mutant, Work

MEMORY_BYTES = 4 << 30  # of one mutant
BROKEN = 70  # exit code: this plugin has failed, not a test
START_S = 20  # of processor time, for a new process to import everything
QUICK_S = 0.25  # of processor time, for one test
STUCK_S = 3600.0  # of the clock, on a machine that is busy: past it, a mutant waits for ever

ERRORS = os.fdopen(os.dup(2), "w")  # of this plugin: pytest is about to take the former one for those of tests

Line = tuple[str, int]  # of a file


class Measured(NamedTuple):
    """A Measured says what a test needs and runs without a mutant."""

    seconds: float
    lines: set[Line]


class ImportedLines:
    """ImportedLines records which lines of some files run while tests are imported."""

    def __init__(self, files: set[str]) -> None:
        self._files = files
        self._ran: set[Line] = set()

    def start(self) -> None:
        sys.settrace(self._call)

    def stop(self) -> set[Line]:
        sys.settrace(None)
        return self._ran

    def _call(self, frame: FrameType, event: str, value: Any) -> Any:
        return self._line if frame.f_code.co_filename in self._files else None

    def _line(self, frame: FrameType, event: str, value: Any) -> Any:
        self._ran.add((frame.f_code.co_filename, frame.f_lineno))
        return self._line


class Marks(ast.NodeTransformer):
    """Marks let each statement of a file's functions report its first line when it runs. A trace would take longer."""

    REPORT = "report_that_a_line_runs"  # among the builtins

    def __init__(self, file: str) -> None:
        self._file = file

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and not isinstance(node, ast.Module | ast.ClassDef):
                setattr(node, name, [each for statement in block for each in (self._mark(statement), statement)])
        return node

    def _mark(self, statement: ast.stmt) -> ast.stmt:
        line = ast.Tuple([ast.Constant(self._file), ast.Constant(statement.lineno)], ast.Load())
        mark = ast.Expr(ast.Call(ast.Name(self.REPORT, ast.Load()), [line], []))
        return ast.fix_missing_locations(ast.copy_location(mark, statement))


class Trying:
    """Trying tries the mutants of a Work in a session of pytest."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._files = {self._path(mutant) for mutant in work.mutants}
        self._imported = ImportedLines(self._files)
        self._ran_at_import: set[Line] = set()
        self._functions: list[FunctionType] = []
        self._measured: list[Measured] = []  # of each test
        self._kills = Counter[int]()  # of each test

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        """Make what tests draw at random the same for each mutant, and do without the simplest example that fails."""
        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("mutants", settings(), derandomize=True, database=None, phases=phases)
        settings.load_profile("mutants")
        self._imported.start()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._ran_at_import = self._imported.stop()
        if session.testsfailed:
            return True
        gc.unfreeze()
        # not isinstance, which asks an object for its class: some of torch answer with a warning
        functions = (each for each in gc.get_objects() if type(each) is FunctionType)
        self._functions = [each for each in functions if each.__code__.co_filename in self._files]
        gc.freeze()
        measured = in_fork(lambda: self._measure(session))
        if measured is None:
            session.testsfailed = 1
            return True
        self._measured = measured
        self._try_all(session)
        return True

    # ------------------------------------------------------------------------------------------- without a mutant
    def _measure(self, session: pytest.Session) -> list[Measured] | None:
        """Run the tests. Returns None if one fails."""
        for file in self._files:
            marked = Marks(file).visit(ast.parse(Path(file).read_text()))
            assert self._install(file, marked), f"statements of {file} could not be marked"
        measured = []
        for at, _ in enumerate(session.items):
            began, lines = time.process_time(), set[Line]()
            setattr(builtins, Marks.REPORT, lines.add)
            run_test(session, at, at + 1 if at + 1 < len(session.items) else None)
            measured.append(Measured(time.process_time() - began, lines))
            if session.testsfailed:
                reporter = session.config.pluginmanager.get_plugin("terminalreporter")
                assert reporter is not None
                reporter.summary_failures()
                return None
        return measured

    # --------------------------------------------------------------------------------------------- with a mutant
    def _try_all(self, session: pytest.Session) -> None:
        running: dict[int, tuple[int, int]] = {}  # mutant, and where to read which test noticed it, by process
        todo = iter(range(len(self._work.mutants)))
        while True:
            while (
                len(running) < self._work.at_once and not self._is_late() and (number := next(todo, None)) is not None
            ):
                read, write = os.pipe()
                if not (process := os.fork()):
                    with must_exit():
                        self._try_here(session, number, write)
                os.close(write)
                running[process] = number, read
            if not running:
                return
            process, status = os.wait()
            number, read = running.pop(process)
            with os.fdopen(read, "rb") as noticed:
                self._kills.update(map(int, noticed.read().split()))
            if os.waitstatus_to_exitcode(status) == BROKEN:
                raise RuntimeError(f"mutant {number} could not be tried")
            os.write(self._work.results, f"{number} {int(status == 0)}\n".encode())

    def _is_late(self) -> bool:
        return self._work.until is not None and time.monotonic() > self._work.until

    def _try_here(self, session: pytest.Session, number: int, noticed: int) -> NoReturn:
        """Run the tests with a mutant, and end this process: with 0 if all pass."""
        mutant, is_accepted = self._work.mutants[number], number in self._work.accepted
        file = self._path(mutant)
        is_installed = self._install(file, mutant.text)
        most_s = QUICK_S if is_accepted else math.inf
        tests = [
            at
            for at, test in enumerate(self._measured)
            if is_installed and (file, mutant.first) in test.lines and test.seconds <= most_s
        ]
        tests.sort(key=lambda at: self._measured[at].seconds / (1 + self._kills[at]))
        self._limit([self._measured[at] for at in tests], 0)
        for at, following in zip_longest(tests, tests[1:]):
            run_test(session, at, following)
            if session.testsfailed:
                os.write(noticed, str(at).encode())
                os._exit(1)
        statement = {(file, line) for line in range(mutant.first, mutant.last + 1)}
        if not is_accepted and (not is_installed or statement & self._ran_at_import):
            self._limit(self._measured, START_S)
            self._try_in_new_process(session, mutant)
        os._exit(0)

    def _limit(self, tests: list[Measured], start_s: int) -> None:
        """Let the system end this process, and what it becomes, if it uses much more than these tests need."""
        used_s = time.process_time()
        cpu_s = int(used_s + 3 * sum(test.seconds for test in tests)) + start_s + self._work.spare_s
        for what, most in (resource.RLIMIT_CPU, cpu_s), (resource.RLIMIT_DATA, MEMORY_BYTES):
            resource.setrlimit(what, (most, resource.getrlimit(what)[1]))
        signal.setitimer(signal.ITIMER_REAL, STUCK_S)

    def _install(self, file: str, text: str | ast.Module) -> bool:
        """Give the functions of a file other code. Returns False if that is impossible, or there are none."""
        functions = [function for function in self._functions if function.__code__.co_filename == file]
        try:
            codes = dict(codes_of(compile(text, file, "exec", dont_inherit=True)))
            for function in functions:
                function.__code__ = codes[place_of(function.__code__)]
        except (SyntaxError, KeyError, ValueError):  # or other lines, or other variables of the function around it
            return False
        return bool(functions)

    def _try_in_new_process(self, session: pytest.Session, mutant: Mutant) -> NoReturn:
        """Run all tests, the quickest file first, with a copy of the mutant's package before the one without it."""
        package = Path(self._path(mutant)).parent
        while (package.parent / "__init__.py").exists():
            package = package.parent
        copies = self._work.root.with_name("mutants") / str(os.getpid())
        shutil.copytree(package, copies / package.name)
        (copies / Path(self._path(mutant)).relative_to(package.parent)).write_text(mutant.text)
        seconds: dict[str, float] = {}
        for item, test in zip(session.items, self._measured, strict=True):
            file = str(item.path)
            seconds[file] = seconds.get(file, 0.0) + test.seconds
        options = [word for word in sys.orig_argv[1:] if not word.endswith(".py")]
        environment = os.environ | {"PYTHONPATH": f"{copies}{os.pathsep}{os.environ['PYTHONPATH']}"}
        del environment[FILE]
        os.execve(sys.executable, [sys.executable, *options, *sorted(seconds, key=seconds.__getitem__)], environment)

    def _path(self, mutant: Mutant) -> str:
        return str(self._work.root / mutant.file)


def pytest_configure(config: pytest.Config) -> None:
    if FILE in os.environ:
        config.pluginmanager.register(Trying(pickle.loads(Path(os.environ[FILE]).read_bytes())))


@contextmanager
def must_exit() -> Iterator[None]:
    """Let a fork end inside, or end it as broken: an error of this plugin kills no mutant."""
    try:
        yield
    finally:
        traceback.print_exc(file=ERRORS)
        ERRORS.flush()
        os._exit(BROKEN)


def in_fork(function: Callable[[], Any]) -> Any:
    """Return what the function returns in a fork of this process; None if that ends early."""
    read, write = os.pipe()
    if not os.fork():
        with must_exit():
            with os.fdopen(write, "wb") as result:
                pickle.dump(function(), result)
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as result:
        found = result.read()
    os.wait()
    return pickle.loads(found) if found else None


def run_test(session: pytest.Session, at: int, following: int | None) -> None:
    """Run the test with the number `at`, before the one with the number `following`."""
    following_item = None if following is None else session.items[following]
    session.config.hook.pytest_runtest_protocol(item=session.items[at], nextitem=following_item)


def place_of(code: CodeType) -> tuple[str, int]:
    return code.co_qualname, code.co_firstlineno


def codes_of(code: CodeType) -> Iterator[tuple[tuple[str, int], CodeType]]:
    """Yield all code that is inside some code, by its place in the file."""
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield place_of(each), each
            yield from codes_of(each)
