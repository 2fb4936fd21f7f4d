"""How often an agent looks for garbage: seldom, because a gate makes none.

Requests and connections end without a cycle that only the collector could find. Looking for one after every 700
objects, and at all that was imported, took more than a tenth of a gate's CPU time.
"""

from __future__ import annotations

import gc

AFTER_OBJECTS = 10_000


def look_seldom() -> None:
    """Once, when all is imported: it is not looked at again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(AFTER_OBJECTS)
