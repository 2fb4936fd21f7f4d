"""Cosmic Ray makes the mutants of a file: each is the file's text with one small change."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Set
from itertools import pairwise

import cosmic_ray.plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator

from mutants.definitions import REST, definitions_at, start_line
from mutants.work import Mutant

Position = tuple[int, int]  # line from 1, column from 0

# What no person would write by mistake, in operators of Cosmic Ray: it would be most of the mutants.
UNLIKELY = ("RShift", "LShift", "BitAnd", "BitOr", "BitXor", "Pow", "FloorDiv", "Mod", "Is", "IsNot")


def mutants_of(file: str, text: str, definitions: Set[str]) -> Iterator[Mutant]:
    """Make the mutants of some definitions of a file that a person might write."""
    tree, lines, names = ast.parse(text), text.splitlines(keepends=True), definitions_at(text)
    is_outside, statements = outside_code(tree), [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    ranges = sorted(((start_line(node), end_of(node)[0]) for node in statements), key=lambda each: each[1] - each[0])
    begins = [start_line(node) - 1 for node in tree.body]
    for begin, end in pairwise([*begins, len(lines)]):  # by itself, because the whole text is read for each mutant
        part = "".join(lines[begin:end])
        for operator, occurrence, start in mutations_of(part):
            at = start[0] + begin, start[1]
            name = names.get(at[0], REST)
            if name not in definitions or is_outside(operator, at):
                continue
            mutated = mutate_code(part, operator, occurrence)
            if not is_code(mutated):
                continue  # as `not x := y`
            whole = "".join([*lines[:begin], mutated, *lines[end:]])
            first, last = next(each for each in ranges if each[0] <= at[0] <= each[1])
            yield Mutant(file, name, *difference(text, whole), first, last, whole)


def mutations_of(text: str) -> Iterator[tuple[Operator, int, Position]]:
    nodes = list(ast_nodes(get_ast(text)))
    for name in filter(is_likely, cosmic_ray.plugins.operator_names()):
        operator_class = cosmic_ray.plugins.get_operator(name)
        if not operator_class.arguments():  # else it has to be told what to change
            operator = operator_class()
            positions = (position for node in nodes for position in operator.mutation_positions(node))
            for occurrence, (start, _) in enumerate(positions):
                yield operator, occurrence, start


def is_likely(operator_name: str) -> bool:
    return not any(part in UNLIKELY for part in operator_name.split("_")[1:])


def is_code(text: str) -> bool:
    try:
        compile(text, "mutant", "exec")
    except SyntaxError:
        return False
    return True


def difference(text: str, mutated: str) -> tuple[str, str]:
    """Return the lines that differ, each text's joined."""
    was, now = text.splitlines(), mutated.splitlines()
    while was and now and was[0] == now[0]:
        del was[0], now[0]
    while was and now and was[-1] == now[-1]:
        del was[-1], now[-1]
    return " ".join(map(str.strip, was)), " ".join(map(str.strip, now))


def outside_code(tree: ast.Module) -> Callable[[Operator, Position], bool]:
    """Return whether a mutation is of what only mypy reads, or of a `*` that is no operator: it changes nothing."""
    operators = [node for node in ast.walk(tree) if isinstance(node, ast.BinOp)]
    for_mypy = [*ranges_for_mypy(tree)]

    def is_outside(operator: Operator, at: Position) -> bool:
        if any(start <= at < end for start, end in for_mypy):
            return True
        if "ReplaceBinaryOperator" not in type(operator).__name__:
            return False
        return not any(end_of(node.left) <= at < start_of(node.right) for node in operators)

    return is_outside


def ranges_for_mypy(tree: ast.Module) -> Iterator[tuple[Position, Position]]:
    """Return where annotations are, and whether a dataclass is frozen: mypy finds what sets a field of it."""
    for node in ast.walk(tree):
        found = [getattr(node, name, None) for name in ("annotation", "returns")]
        found += [node.value] if isinstance(node, ast.keyword) and node.arg == "frozen" else []
        yield from ((start_of(each), end_of(each)) for each in found if isinstance(each, ast.expr))


def start_of(node: ast.expr) -> Position:
    return node.lineno, node.col_offset


def end_of(node: ast.expr | ast.stmt) -> Position:
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return node.end_lineno, node.end_col_offset
