"""The definitions of a file, each with a fingerprint of its code: the same for any form, comments and docstrings.

A definition is a function, a class without what is defined in it, a constant, or a field.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from functools import cache
from hashlib import sha256
from typing import Any

REST = "<module>"  # the statements of a module that define nothing


@cache
def fingerprints_of(text: str) -> dict[str, str]:
    """Return a fingerprint of each definition, by its qualified name. Those of one name have one together."""
    parts: dict[str, list[ast.stmt]] = {}
    for name, statement in parts_of(ast.parse(text).body):
        parts.setdefault(name, []).append(statement)
    return {name: sha256(repr(essence(part)).encode()).hexdigest()[:16] for name, part in parts.items()}


def definitions_at(text: str) -> dict[int, str]:
    """Return the name of the definition that each line is of, if any. A function inside another is part of it."""
    parts = parts_of(ast.parse(text).body)
    return {line: name for name, each in parts for line in range(start_line(each), (each.end_lineno or 0) + 1)}


def parts_of(body: Sequence[ast.stmt], inside: str = "") -> Iterator[tuple[str, ast.stmt]]:
    """Yield each statement but imports and docstrings, with the name of its definition; a class before its content."""
    for statement in body:
        match statement:
            case ast.Import() | ast.ImportFrom() | ast.Expr(ast.Constant()):
                continue
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield f"{inside}{name}", statement
            case ast.Assign(targets=[ast.Name(name)]) | ast.AnnAssign(target=ast.Name(name)):
                yield f"{inside}{name}", statement
            case ast.ClassDef(name=name):
                yield f"{inside}{name}", ast.ClassDef(**{**vars(statement), "body": []})
                yield from parts_of(statement.body, f"{inside}{name}.")
            case _:
                yield inside.rstrip(".") or REST, statement


def essence(node: Any) -> Any:
    """Return what a syntax tree says as nested tuples, which are the same in all versions of Python.

    What is empty is left out, as fields that only newer versions have, and so are docstrings.
    """
    if isinstance(node, ast.AST):
        fields = ((name, value) for name, value in ast.iter_fields(node) if value not in (None, []))
        return type(node).__name__, *((name, essence(value)) for name, value in fields)
    if isinstance(node, list):
        return tuple(essence(each) for each in node if not is_docstring(each))
    return node


def is_docstring(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def start_line(node: ast.stmt) -> int:
    """Return the first line of a statement, or that of its first decorator."""
    line: int = min(each.lineno for each in (node, *getattr(node, "decorator_list", ())))
    return line
