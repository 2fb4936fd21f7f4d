"""One name, one meaning: a reader who greps for a class finds one."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]


def classes(*folders: str) -> dict[str, list[str]]:
    """Where each class of the product is defined, by its name."""
    found: dict[str, list[str]] = defaultdict(list)
    for folder in folders:
        for file in sorted((ROOT / folder).glob("**/colocated_rl_*/**/*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    found[node.name].append(f"{file.relative_to(ROOT)}:{node.lineno}")
    return found


def test_no_two_modules_define_a_class_of_one_name() -> None:
    found = classes("operator", "workloads")

    assert len(found) > 300, "the product's classes were not found"
    assert {} == {name: places for name, places in found.items() if len(places) > 1}
