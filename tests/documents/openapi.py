"""This module makes the OpenAPI documents of the rollout controller and of trainers."""

from __future__ import annotations

import json
import re
from typing import Any

from colocated_rl_api import trainer_wire
from colocated_rl_api.trainer_wire import TrainerEnvironment, TrainerError, TrainerStatus
from colocated_rl_rollout.pages.interface import interface
from colocated_rl_rollout.pages.openapi import (
    JSON,
    Operation,
    Route,
    document,
)
from colocated_rl_trainer.protocol.rank_server import ROUTES

SAID = re.compile(r"^\* `(?P<method>GET|POST) (?P<path>\S+)`(?P<meaning>.*?)(?=^\*|^$)", re.MULTILINE | re.DOTALL)
FAILED = {
    "400": ("the request can't be read", TrainerError),
    "409": ("it can't be done from the present state", TrainerError),
    "500": (
        f"it failed, and the process ends: the message says what to do. With the error {trainer_wire.NOT_RETRIABLE} it "
        "would end again until the job's settings change",
        TrainerError,
    ),
    "503": ("nothing has changed, and it may be asked for again: the message says what to do", TrainerError),
}


def trainer_operations() -> dict[Route, Operation]:
    """Return the trainer's operations, described in the words of the protocol."""
    meanings = {
        Route(found["method"], found["path"]): found["meaning"] for found in SAID.finditer(trainer_wire.__doc__ or "")
    }
    return {
        route: Operation(
            tag="Trainer rank",
            summary=" ".join(meaning.partition(":")[2].replace("`", "").split()),
            answers={JSON: TrainerStatus},
            body=ROUTES[route.path] if route.method == "POST" else None,
            refusals=FAILED if route.method == "POST" else {"500": FAILED["500"]},
        )
        for route, meaning in meanings.items()
    }


def trainer() -> dict[str, Any]:
    return document(
        trainer_operations(),
        info={
            "title": "Colocated RL: trainer protocol",
            "version": f"v{trainer_wire.PROTOCOL}",
            "description": "HTTP/1.1 on a Unix socket for each rank, whose path is in its environment as "
            f"{TrainerEnvironment.SOCKET}. Every request is idempotent: asked again for an effect that holds, "
            "it answers at once; asked again while it is under way, it waits for that one.",
        },
        servers=[{"url": "http://trainer", "description": "the socket; any host will do"}],
    )


def rollout_page() -> str:
    return _written(interface())


def trainer_page() -> str:
    return _written(trainer())


def _written(schema: dict[str, Any]) -> str:
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"
