"""Define the base of every message between the parts, and how a weights version is written in one."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator
from pydantic.alias_generators import to_camel

from colocated_rl_api.rungs import WeightVersion


class Wire(BaseModel):
    """Every message has this base: camelCase on the wire, immutable, unknown fields ignored so that versions can meet.

    Every number is finite: JSON has no other, so that one could be received and never be sent on.
    """

    model_config = ConfigDict(
        alias_generator=to_camel, validate_by_name=True, frozen=True, extra="ignore", allow_inf_nan=False
    )


def _read_version(value: object) -> WeightVersion:
    if isinstance(value, WeightVersion):
        return value
    if not isinstance(value, str):
        raise ValueError(f"weight version {value!r} is not STEP-LINEAGE")
    return WeightVersion.parse(value)


_Written = Annotated[str, Field(pattern=r"^\d{1,9}-\d{1,9}$")]
Version = Annotated[
    WeightVersion,
    PlainValidator(_read_version, json_schema_input_type=_Written),
    PlainSerializer(str, return_type=str),
]
"""A `WeightVersion`, written STEP-LINEAGE on the wire."""
