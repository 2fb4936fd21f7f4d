"""The manifests that tests give to the API server, to the models and to the command line alike.

A row of good.yaml or bad.yaml is manifests/good/minimal.yaml with a JSON merge patch (RFC 7396). A row without a patch
is a file in manifests/good or manifests/bad: it holds null, which in a patch would remove the field, or it sets nearly
every field.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import quick_yaml
from colocated_rl_cli.base.yaml_text import written

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Case:
    """A manifest as text, and for a bad one what refuses it.

    field: the one that the refusal names. server, models: words of the API server's refusal and of the models'.
    """

    name: str
    text: str
    field: str = ""
    server: str = ""
    models: str = ""


def cases(*manifests: Case) -> pytest.MarkDecorator:
    """Run a test once per manifest, through the fixture `case`: pytest then shows the manifest of a failure."""
    return pytest.mark.parametrize("case", manifests, ids=lambda case: case.name, indirect=True)


def merged(value: object, patch: object) -> object:
    """Apply a JSON merge patch: null removes a field, a list replaces a list."""
    if not isinstance(patch, dict):
        return patch
    result: dict[str, object] = dict(value) if isinstance(value, dict) else {}
    for key, change in patch.items():
        if change is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), change)
    return result


def _cases(kind: str) -> dict[str, Case]:
    folder = HERE / "manifests" / kind
    rows: list[dict[str, Any]] = quick_yaml.load((HERE / f"{kind}.yaml").read_text())
    cases = {row["name"]: _case(row, folder) for row in rows}
    assert len(cases) == len(rows), f"two rows of {kind}.yaml have one name"
    files = {file.stem for file in folder.glob("*.yaml")}
    assert files == {row["name"] for row in rows if "patch" not in row}, f"files of {folder} are not those of its table"
    return cases


def _case(row: dict[str, Any], folder: Path) -> Case:
    name, words = row["name"], row.get("says", "")
    text = written(merged(_MINIMAL, row["patch"])) if "patch" in row else (folder / f"{name}.yaml").read_text()
    return Case(name, text, row.get("field", ""), row.get("server", words), row.get("models", words))


_MINIMAL = quick_yaml.load((HERE / "manifests/good/minimal.yaml").read_text())
GOOD = _cases("good")
BAD = _cases("bad")
_ROOT = HERE.parents[1]
EXAMPLES = [
    *(Case(file.stem, file.read_text()) for file in sorted((_ROOT / "crds/examples").glob("*.yaml"))),
    *(Case(file.parent.name, file.read_text()) for file in sorted((_ROOT / "examples").glob("*/job.yaml"))),
]
GPU_EXAMPLES = [Case(file.stem, file.read_text()) for file in sorted((_ROOT / "examples/gpu").glob("*.yaml"))]
EXAMPLES += GPU_EXAMPLES
