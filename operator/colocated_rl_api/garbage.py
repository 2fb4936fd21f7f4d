"""Make Python's garbage collector run seldom, in processes that make hardly any cycles.

By default it scans what is new after every 700 objects, and most of it is still in use: requests under way, reports of
members. That took a third of the main thread's time of a rollout controller with a thousand samples in flight, a third
of an operator's pass over a thousand members, and a tenth of a gate's time. What ends without a cycle is freed without
a collector.
"""

from __future__ import annotations

import gc

AFTER_OBJECTS = 10_000


def look_seldom(after_objects: int = AFTER_OBJECTS) -> None:
    """Exclude all objects made so far from collection, and collect seldom. Call it once, after all imports.

    after_objects: how many more there must be before the newest are scanned.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(after_objects)
