"""Pauses before another attempt: that double, with an end however often they did, or that a server asks for."""

from __future__ import annotations

MOST_TIMES = 32  # beyond that a float overflows some day, and every limit is reached long before
MOMENT_S = 0.001  # how much a timer may fire early by its loop's own clock: uvloop's counts milliseconds


def doubled_s(first_s: float, times: int, most_s: float) -> float:
    """Return a pause that has doubled so many times, up to a limit, in seconds."""
    return min(first_s * 2.0 ** min(times, MOST_TIMES), most_s)


def retry_after_s(header: str | None) -> float | None:
    """Return the seconds of a Retry-After header (RFC 9110, 10.2.3); None without one, and for a date."""
    return float(header) if header and header.isascii() and header.isdigit() else None
