"""Every member reads its environment and the job's own file at its start."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pydantic

from colocated_rl_api.member_wire import JobFile


class SettingsError(Exception):
    """The process can't start with its settings; the message names what to change."""


def required(environment: Mapping[str, str], name: str) -> str:
    """Return a variable that the operator's pod template sets. Raises SettingsError."""
    value = environment.get(name, "")
    if not value:
        raise SettingsError(f"environment variable {name} is not set: the operator's pod template sets it")
    return value


def read_job(path: Path) -> JobFile:
    """Read the job file. Raises SettingsError."""
    try:
        return JobFile.read(path.read_bytes())
    except OSError as error:
        raise SettingsError(f"job file {path} can't be read: {error}") from error
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise SettingsError(f"job file {path}: {place}: {first['msg']}") from error
