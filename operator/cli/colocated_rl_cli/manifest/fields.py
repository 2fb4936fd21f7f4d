"""The models' fields by the names that manifests have for them."""

from __future__ import annotations

from pydantic import BaseModel
from pydantic.fields import FieldInfo

Model = type[BaseModel]


def field_of(model: Model | None, name: str) -> FieldInfo | None:
    """None where the model has no such field, or is none."""
    fields = model.model_fields if model else {}
    return next((info for key, info in fields.items() if name == (info.alias or key)), None)


def part_of(field: FieldInfo | None) -> Model | None:
    """The model that a field holds, optional or not; None where it holds something else."""
    annotation = field.annotation if field else None
    candidates = [annotation, *getattr(annotation, "__args__", ())]
    return next((one for one in candidates if isinstance(one, type) and issubclass(one, BaseModel)), None)


def names_of(model: Model) -> list[str]:
    return [info.alias or key for key, info in model.model_fields.items()]
