"""Find why each epoch was raised, as far as a job's records still show it. Pure.

The operator's log has the cause of every epoch, and the status has that of the newest; but who reads a job's records
may have no right to the operator's namespace. Members' log lines show what an epoch climbed to, which implies the kind:
a later step, a new lineage of trainers, or neither, which means another operator. Events show why trainers restarted.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from itertools import pairwise
from typing import Any, NamedTuple

from colocated_rl_api.rungs import WeightVersion
from colocated_rl_cli.evidence.records import Records

FIRST, NEXT, AGAIN, TAKEOVER = "FirstStart", "NextStep", "TrainersRestarted", "OperatorRestarted"
RECOVERIES = {"TrainerDied", "PodReplaced", "RungDeadlineExceeded", "WeightsDiffer"}


class _Climb(NamedTuple):
    epoch: int
    version: WeightVersion
    reported_at: float  # timestamp of its first log line, in seconds since the epoch


def causes_by_epoch(records: Records) -> dict[int, str]:
    """Map each epoch to its cause; epochs without a known cause are left out."""
    climbs = _climbs(records)
    found = {climbs[0].epoch: FIRST} if climbs and climbs[0].epoch == 1 else {}
    for before, climb in pairwise(climbs):
        if climb.version.lineage > before.version.lineage:
            found[climb.epoch] = _recovery(records, after=before.reported_at, until=climb.reported_at)
        else:
            found[climb.epoch] = NEXT if climb.version.step > before.version.step else TAKEOVER
    status = records.job.get("status", {})
    if status.get("epoch") is not None and status.get("cause"):
        found[int(status["epoch"])] = str(status["cause"])
    for line in records.lines:
        if line.get("event") == "epoch raised":
            found[int(line["epoch"])] = str(line["reason"])
    return found


def _climbs(records: Records) -> list[_Climb]:
    found: dict[int, _Climb] = {}
    for line in records.lines:
        if line.get("event") not in ("target accepted", "rung reached") or "epoch" not in line or "version" not in line:
            continue
        climb = _Climb(int(line["epoch"]), WeightVersion.parse(str(line["version"])), float(line["ts"]))
        known = found.get(climb.epoch)
        if known is None or climb.reported_at < known.reported_at:
            found[climb.epoch] = climb
    return [found[epoch] for epoch in sorted(found)]


def _recovery(records: Records, *, after: float, until: float) -> str:
    """Return the reason of the newest recovery event between the two times."""
    reasons = [str(event["reason"]) for event in records.events if after <= (event_ts(event) or 0.0) <= until + 1.0]
    return next((reason for reason in reversed(reasons) if reason in RECOVERIES), AGAIN)


def event_time(event: Mapping[str, Any]) -> str:
    """Return the time of an event's newest occurrence in RFC 3339; empty if it has none."""
    newest = (event.get("series") or {}).get("lastObservedTime")
    times = (newest, event.get("lastTimestamp"), event.get("eventTime"), event.get("firstTimestamp"))
    return next((str(one) for one in times if one), "")


def event_ts(event: Mapping[str, Any]) -> float | None:
    """Return the time of an event's newest occurrence in seconds since the epoch, or None."""
    try:
        return datetime.fromisoformat(event_time(event)).timestamp()
    except ValueError:
        return None
