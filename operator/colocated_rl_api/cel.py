"""Evaluate the rules of the resource where no API server does: they are written once, in CEL.

This is the part of CEL that our rules use; anything else raises. Its grammar is Python's but for three operators, so
Python's parser reads it. A contract test compares each rule with the API server; docs/design.md has the reason why this
is no library.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.alias_generators import to_snake

Scope = Mapping[str, Any]
Expression = Callable[[Scope], Any]

_TOKEN = re.compile(r"""r?'[^']*'|r?"[^"]*"|!=|!|&&|\|\|""")
_IN_PYTHON = {"!": "~", "&&": " and ", "||": " or "}  # `not` would bind less tightly than CEL's !
_BINARY: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Mult: operator.mul,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.In: lambda item, container: item in container,
}
_METHODS: dict[str, Callable[..., Any]] = {
    "format": lambda text, values: text % tuple(values),
    "matches": lambda text, pattern: re.search(re.sub(r"\$$", r"\\Z", pattern), text) is not None,  # RE2's $ is the end
    "size": len,
    "startsWith": str.startswith,
}
_MACROS: dict[str, Callable[[Any, Callable[[Any], Any]], Any]] = {
    "all": lambda items, holds: all(map(holds, items)),
    "exists": lambda items, holds: any(map(holds, items)),
    "filter": lambda items, holds: list(filter(holds, items)),
}


class UnknownCel(Exception):
    """A rule uses a part of CEL that is not here: a bug in the rule, which each manifest would show."""


@cache
def compiled(text: str) -> Expression:
    """Return a function from values by name to the value of the expression. Raises UnknownCel.

    A value is a model, whose fields are named by their aliases and absent where they are None, or plain data.
    """
    python = _TOKEN.sub(lambda token: _IN_PYTHON.get(token[0], token[0]), text)
    try:
        return _compiled(ast.parse(python.strip(), mode="eval").body)
    except SyntaxError as error:
        raise UnknownCel(text) from error


def _compiled(node: ast.expr) -> Expression:
    match node:
        case ast.Constant(value):
            return lambda scope: value
        case ast.Name(name):
            return lambda scope: scope[name]
        case ast.List(nodes):
            items = [_compiled(each) for each in nodes]
            return lambda scope: [item(scope) for item in items]
        case ast.Attribute(owner, name):
            part = _compiled(owner)
            return lambda scope: _member(part(scope), name)
        case ast.Subscript(owner, ast.Name() as key):  # of a map, by what a macro goes through
            entries, chosen = _compiled(owner), _compiled(key)
            return lambda scope: entries(scope)[chosen(scope)]
        case ast.UnaryOp(ast.Invert(), operand):
            denied = _compiled(operand)
            return lambda scope: not denied(scope)
        case ast.BoolOp(both, nodes):
            terms, combine = [_compiled(each) for each in nodes], all if isinstance(both, ast.And) else any
            return lambda scope: combine(term(scope) for term in terms)
        case ast.BinOp(left, symbol, right) | ast.Compare(left, [symbol], [right]) if type(symbol) in _BINARY:
            one, other, compute = _compiled(left), _compiled(right), _BINARY[type(symbol)]
            return lambda scope: compute(one(scope), other(scope))
        case ast.Call(function, arguments):
            return _compiled_call(function, arguments)
        case _:
            raise UnknownCel(ast.unparse(node))


def _compiled_call(function: ast.expr, arguments: list[ast.expr]) -> Expression:
    match function, arguments:
        case ast.Name("has"), [ast.Attribute(owner, name)]:
            part = _compiled(owner)
            return lambda scope: _member(part(scope), name) is not None
        case ast.Name("size"), [collection]:
            items = _compiled(collection)
            return lambda scope: len(items(scope))
        case ast.Attribute(owner, name), [ast.Name(variable), condition] if name in _MACROS:
            items, holds, macro = _compiled(owner), _compiled(condition), _MACROS[name]
            return lambda scope: macro(items(scope), lambda item: holds({**scope, variable: item}))
        case ast.Attribute(owner, name), _ if name in _METHODS:
            subject, given, method = _compiled(owner), [_compiled(each) for each in arguments], _METHODS[name]
            return lambda scope: method(subject(scope), *(each(scope) for each in given))
    raise UnknownCel(ast.unparse(function))


def _member(value: Any, name: str) -> Any:
    return getattr(value, _field(name)) if isinstance(value, BaseModel) else value.get(name)


_field = cache(to_snake)
