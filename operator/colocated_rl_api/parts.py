"""The resource is made of parts that read values as the API server does, of rules with messages, and of quantities.

No type is converted, 2.0 is the integer 2, and null means absent. What a schema can't express is a rule in CEL: the API
server evaluates it from the CRD, and everybody else from the same text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated, Any, ClassVar, NamedTuple, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from colocated_rl_api.cel import compiled


def _read_integer(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def drop_nulls(value: object) -> object:
    return {key: item for key, item in value.items() if item is not None} if isinstance(value, Mapping) else value


VALIDATIONS = "x-kubernetes-validations"


class Rule(NamedTuple):
    """A constraint on one field that a schema can't express. Its message names the field, its value and the remedy.

    message: for the reference. expression: CEL that puts values into the same; `format`, because the server assumes
    that the text of a number may have any length, and refuses to add it to another.
    """

    field: str
    rule: str
    message: str
    expression: str | None = None

    @property
    def in_schema(self) -> dict[str, str]:
        """Return the rule as an item of `x-kubernetes-validations`."""
        expression = {} if self.expression is None else {"messageExpression": self.expression}
        return {"rule": self.rule, "message": self.message, "fieldPath": f".{self.field}", **expression}

    def complaint(self, value: Any) -> str | None:
        """Return the message if the rule does not hold for `value`, a model or plain data, else None.

        A rule that compares with the former value is the server's alone, and holds.
        """
        scope = {"self": value}
        if "oldSelf" in self.rule or compiled(self.rule)(scope):
            return None
        return self.message if self.expression is None else str(compiled(self.expression)(scope))


class Part(BaseModel):
    """Base of every part of the resource: camelCase, immutable, unknown fields refused (a typo is an error)."""

    RULES: ClassVar[tuple[Rule, ...]] = ()

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_name=True,
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
    )

    @model_validator(mode="before")
    @classmethod
    def _read_as_the_server_does(cls, value: object) -> object:
        if not isinstance(value, Mapping):
            return value
        known = {name for field, info in cls.model_fields.items() for name in (field, info.alias)}
        return {key: _read_integer(item) for key, item in value.items() if item is not None or key not in known}

    @model_validator(mode="after")
    def _keeps_its_rules(self) -> Self:
        """Raise an error of type "rule" for the first that does not hold, with it and the field at fault as context."""
        for rule in self.RULES:
            if words := rule.complaint(self):
                raise PydanticCustomError("rule", "{words}", {"words": words, "field": rule.field, "rule": rule.rule})
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler(core)
        if cls.RULES:
            handler.resolve_ref_schema(schema)[VALIDATIONS] = [rule.in_schema for rule in cls.RULES]
        return schema


_WORDS_OF_CEL = frozenset(
    {
        *("as", "break", "const", "continue", "else", "for", "function", "if", "import", "in", "let", "loop"),
        *("namespace", "package", "return", "var", "void", "while"),
    }
)


def fixed(*fields: str) -> tuple[Rule, ...]:
    """Return rules for fields, also of parts, that keep their value or absence as long as the job exists."""
    return tuple(
        _unless(path, _is_kept(path), "can't change once the job exists: make a new job with the new value")
        for path in fields
    )


def fixed_while_running(*fields: str) -> tuple[Rule, ...]:
    """Return rules for fields of the spec, also of its parts, that pods read when they are made."""
    words = "can't change while the job runs: set suspend to true, change it, and set suspend to false again"
    return tuple(
        _unless(path, f"(has(oldSelf.suspend) && oldSelf.suspend) || ({_is_kept(path)})", words) for path in fields
    )


def _unless(path: str, rule: str, words: str) -> Rule:
    field = path.replace("?", "")
    return Rule(field, rule, f"{field} {words}")


def _is_kept(path: str) -> str:
    """Return a rule of the parent: the field's own would not run when the field is added or removed.

    `part?.field` is a field of a part that may be absent. Other parts are there, by their defaults. CEL's optional
    fields would say it in fewer words, but the server takes their cost for unbounded.
    """
    part, _, field = path.rpartition("?.")
    if part:
        return f"{_is_there(part)} && (!has(self.{part}) || ({_is_kept(f'{part}.{field}')}))"
    value = _escaped(path)
    return f"{_is_there(path)} && (!has(self.{path}) || self.{value} == oldSelf.{value})"


def _escaped(path: str) -> str:
    """Return a path whose size the server can bound: it knows a field named like a word of CEL by another name.

    https://kubernetes.io/docs/reference/using-api/cel/#escaping
    """
    return ".".join(f"__{field}__" if field in _WORDS_OF_CEL else field for field in path.split("."))


def _is_there(path: str) -> str:
    return f"has(self.{path}) == has(oldSelf.{path})"


def one_of(chooses: str, *choices: str) -> Rule:
    """Return the rule that exactly one of several members is given. chooses: as in "prompts come from"."""
    return _counted(choices, "== 1", f"{chooses} exactly one of {', '.join(choices[:-1])} and {choices[-1]}")


def at_most_one_of(chooses: str, *choices: str) -> Rule:
    """Return the rule that several members are not given together."""
    return _counted(choices, "<= 1", f"{chooses} at most one of {', '.join(choices[:-1])} and {choices[-1]}")


def _counted(choices: tuple[str, ...], condition: str, words: str) -> Rule:
    given = "[" + ", ".join(f"has(self.{choice})" for choice in choices) + "].filter(given, given).size()"
    return Rule(choices[0], f"{given} {condition}", words, f"'{words}: %d are given'.format([{given}])")


def should_match(pattern: str, words: str) -> tuple[AfterValidator, dict[str, Any]]:
    """Return a pattern with a message: a validator, and the same in CEL."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(words)
        return text

    rule = f"self.matches(r'^({pattern})$')"
    return AfterValidator(check), {VALIDATIONS: [{"rule": rule, "message": words}]}


is_path, path_rule = should_match(
    r"(/\.?[A-Za-z0-9_-][A-Za-z0-9._-]*)+", "should be a path from the root, without .. in it: /data/cache"
)
is_inside, inside_rule = should_match(
    r"\.|[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*",
    "should be a path inside the volume, without / at its ends or .. in it: models/small, or . for the volume's root",
)
is_url, url_rule = should_match(
    r"https?://[A-Za-z0-9._~\[\]:-]+(/[A-Za-z0-9._~%!$&()*+,;=:@/-]*)?",
    "should be an http or https address without user, query or fragment: http://judge.default.svc:8000/score",
)


_Item = TypeVar("_Item")


def _check_distinct(items: list[_Item]) -> list[_Item]:
    if len(set(items)) != len(items):
        raise ValueError(f"should be a set: {', '.join(map(str, items))} has one of them twice")
    return items


Distinct = Annotated[
    list[_Item], AfterValidator(_check_distinct), Field(json_schema_extra={"x-kubernetes-list-type": "set"})
]
"""A list in which nothing stands twice."""


_MAX_EXACT_INTEGER = 2**53 - 1  # above, JSON readers disagree


def _read_quantity(value: object) -> object:
    value = _read_integer(value)
    if isinstance(value, int) and not isinstance(value, bool):
        if not 0 <= value <= _MAX_EXACT_INTEGER:
            raise ValueError(f"a quantity without a suffix should be between 0 and {_MAX_EXACT_INTEGER}")
        return str(value)
    return value


_QUANTITY = r"[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?"
_is_quantity, _ = should_match(
    _QUANTITY,
    "should be a number, with one of m, k, M, G, T, P, E, Ki, Mi, Gi, Ti, Pi, Ei behind it or none: 500m, 4Gi, 2",
)
Quantity = Annotated[
    str,
    Field(
        max_length=32,
        json_schema_extra={
            "pattern": f"^({_QUANTITY})$",  # a rule's cost has no bound in Kubernetes 1.33
            "x-kubernetes-int-or-string": True,
            "minimum": 0,
            "maximum": _MAX_EXACT_INTEGER,
        },
    ),
    BeforeValidator(_read_quantity),
    _is_quantity,
]
"""A Kubernetes quantity: `2`, `"500m"`, `"4Gi"`."""


def size_in_bytes(quantity: str) -> int:
    """Return what a Kubernetes quantity says: "8Gi" is 8 * 2**30."""
    number = quantity.rstrip("kKMGTPEim")
    unit = quantity[len(number) :]
    if unit == "m":
        return math.ceil(Decimal(number) / 1000)
    step = 1024 if unit.endswith("i") else 1000
    return math.ceil(Decimal(number) * Decimal(step) ** " kMGTPE".index(unit[:1].replace("K", "k") or " "))


ResourceMap = Annotated[
    dict[Annotated[str, Field(max_length=253)], Quantity], Field(max_length=16), BeforeValidator(drop_nulls)
]
Options = Annotated[dict[str, Any], Field(max_length=256)]
"""Free-form options, handed through as they stand."""


class Resources(Part):
    """Compute resources of a container, as in core/v1."""

    requests: ResourceMap = Field(default_factory=dict, description="What the scheduler reserves, by resource name.")
    limits: ResourceMap = Field(default_factory=dict, description="What the container may use, by resource name.")


class Claimed(Part):
    """Request for a claim that the operator makes for the job."""

    size: Quantity = Field(default="10Gi", description="Requested capacity of the claim.")
    storage_class_name: str | None = Field(
        default=None, max_length=253, description="Storage class; the cluster's default when absent."
    )


class Volume(Claimed):
    """A volume that the operator claims for the job."""

    retain: bool = Field(default=True, description="Keep the claim when the job is deleted.")
