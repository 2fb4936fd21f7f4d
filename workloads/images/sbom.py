"""Writes what Python libraries an image holds, as CycloneDX 1.6: `python sbom.py IMAGE FILE [SITE-PACKAGES]`.

Run by the image's own interpreter while the image is built, so that the list is of what is there and not of what was
asked for. SITE-PACKAGES: of what is only copied into that interpreter's environment later. Standard library alone, and
the same bytes for the same libraries: no time, no random serial number.
"""

from __future__ import annotations

import json
import re
import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any


def bill_of_materials(image: str, *site_packages: str) -> dict[str, Any]:
    """List this interpreter's environment; the first on the path counts, as for an import."""
    found: dict[str, Distribution] = {}
    for distribution in distributions(path=[*sys.path, *site_packages]):
        found.setdefault(canonical(distribution.name), distribution)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {"type": "container", "name": f"colocated-rl/{image}"}},
        "components": [_component(name, found[name]) for name in sorted(found)],
    }


def canonical(name: str) -> str:
    """Return a project's name as package indexes spell it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _component(name: str, distribution: Distribution) -> dict[str, Any]:
    address = f"pkg:pypi/{name}@{distribution.version.replace('+', '%2B')}"
    component: dict[str, Any] = {
        "type": "library",
        "bom-ref": address,
        "name": name,
        "version": distribution.version,
        "purl": address,
    }
    licences = distribution.metadata.get_all("License-Expression", [])
    return component | ({"licenses": [{"expression": licence} for licence in licences]} if licences else {})


if __name__ == "__main__":
    image, file, *elsewhere = sys.argv[1:]
    Path(file).write_text(json.dumps(bill_of_materials(image, *elsewhere), indent=1) + "\n")
