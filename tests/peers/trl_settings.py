"""Settings of trl that all programs which run it have."""

from __future__ import annotations

from typing import Any

QUIET_ON_A_CPU: dict[str, Any] = {
    "gradient_checkpointing": False,
    "use_cpu": True,
    "report_to": [],
    "save_strategy": "no",
    "logging_strategy": "no",
    "disable_tqdm": True,
}
