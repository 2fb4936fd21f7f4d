"""Call the Hugging Face hub through its own library, and again while the hub or the network fails."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import TypeVar

FIRST_PAUSE_S = 1.0  # doubled each time, up to
LONGEST_PAUSE_S = 60.0

_Answer = TypeVar("_Answer")


class HubFailed(Exception):
    """The hub gave no answer in time, or one that asking again does not change."""


def call(ask: Callable[[], _Answer], *, patience_s: float) -> _Answer:
    """Return what `ask` returns; it imports `huggingface_hub` itself, after this has set what the import reads.

    patience_s: how long to retry. Raises HubFailed with the error's first line.
    """
    os.environ["HF_HUB_DISABLE_XET"] = os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    # Both log addresses, also signed ones of downloads; what the library warns of, it or this function tries again.
    os.environ["HF_HUB_VERBOSITY"] = "error"
    logging.getLogger("httpx").setLevel(logging.WARNING)
    import httpx

    give_up, pause_s = time.monotonic() + patience_s, FIRST_PAUSE_S
    while True:
        try:
            return ask()
        except (httpx.HTTPError, OSError) as error:
            if not _may_pass(error) or time.monotonic() + pause_s > give_up:
                words = str(error).partition("\n")[0]  # some errors have no message
                raise HubFailed(f"{type(error).__name__}: {words}") from error
        except (ValueError, LookupError, TypeError) as error:  # the library refuses the answer, or can't read it
            raise HubFailed(f"its answer is none of a hub: {type(error).__name__}: {error}") from error
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _may_pass(error: Exception) -> bool:
    """Return whether the network or the hub is at fault, and neither the disk nor the job."""
    response = getattr(error, "response", None)
    is_of_the_disk = getattr(error, "errno", None) is not None
    return not is_of_the_disk and (response is None or response.status_code == 429 or response.status_code >= 500)
