"""Look up the models' fields by their names in manifests."""

from __future__ import annotations

from pydantic import BaseModel
from pydantic.fields import FieldInfo

Model = type[BaseModel]


def field_of(model: Model | None, name: str) -> FieldInfo | None:
    """Return the model's field of that name, or None."""
    fields = model.model_fields if model else {}
    return next((info for key, info in fields.items() if name == (info.alias or key)), None)


def part_of(field: FieldInfo | None) -> Model | None:
    """Return the model that a field holds, optional or not; None if it holds something else."""
    annotation = field.annotation if field else None
    candidates = [annotation, *getattr(annotation, "__args__", ())]
    return next((one for one in candidates if isinstance(one, type) and issubclass(one, BaseModel)), None)


def names_of(model: Model) -> list[str]:
    """Return the names of a model's fields in manifests."""
    return [info.alias or key for key, info in model.model_fields.items()]
