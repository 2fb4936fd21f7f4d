"""This module makes the garbage collector run seldom, because a gate makes no garbage cycles.

Requests and connections end without a cycle that only the collector could find. A collection after every 700 objects,
over all imported objects too, took more than a tenth of a gate's CPU time.
"""

from __future__ import annotations

import gc

AFTER_OBJECTS = 10_000


def look_seldom() -> None:
    """Exclude all objects made so far from collection, and collect seldom. Call it once, after all imports."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(AFTER_OBJECTS)
