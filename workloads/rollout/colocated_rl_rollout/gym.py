"""reasoning-gym, imported without the one of its dependencies that is a C program.

It imports pycosat, a solver of which there is no wheel, for one of its more than a hundred tasks. Images hold no
compiler, so they hold no pycosat either; in its place stands a module that says so to whoever calls it.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys
import warnings
from types import ModuleType
from typing import Any, NoReturn


@functools.cache  # what stands in for pycosat can't be looked for a second time
def import_reasoning_gym() -> Any:
    """The package `reasoning_gym`. Takes seconds."""
    if importlib.util.find_spec("pycosat") is None:
        sys.modules["pycosat"] = _stand_in()
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # where it keeps its list of fonts is no news
    with warnings.catch_warnings():  # of a package that it imports, when that is compiled
        warnings.simplefilter("ignore", SyntaxWarning)
        import reasoning_gym
    return reasoning_gym


def _stand_in() -> ModuleType:
    module = ModuleType("pycosat", "Not installed.")
    for function in ("solve", "itersolve"):
        setattr(module, function, _refuse)
    return module


def _refuse(*_: object, **__: object) -> NoReturn:
    raise ModuleNotFoundError(
        "zebra_puzzles needs pycosat, which this image lacks: add it (`pip install pycosat` compiles it) to an image "
        "of your own, or choose another task",
        name="pycosat",
    )
