"""Define the messages between the rollout controller and an agent's gate, on the agent's data port.

TLS with the job's certificate, `Authorization: Bearer DATA_TOKEN`.

* `POST /generate`, `/v1/completions` and `/v1/chat/completions` are the engine's own routes and shapes (SGLang),
  streamed or not, one sample a request: any client of that engine can use a gate. The gate gives the engine a request
  id of its own, always streams from it, and answers with the last state it saw: what was generated survives an abort
  and a crash of the engine. No other route of the engine can be reached.
* `/generate` answers in columns, not in JSON, to a caller that asks for that and for no stream (`columns.py`).
* closed gate: 503 with `Closed`, at once. Nothing waits in a gate.
* `GET /v1/gate` streams one JSON line of `GateState` now, on each change, and every GATE_LINE_S as a heartbeat, so
  that dispatch needs no poll.

A request that a switch ended comes back with 200 and `finish_reason.type` "abort" and no `status_code`; one that was
lost with its engine likewise, with the tokens read so far. An engine's own error keeps its HTTP status (H8).
"""

from __future__ import annotations

from colocated_rl_api.wire import Version, Wire

GATE_LINE_S = 2.0
MAX_REQUEST_BYTES = 8 * 1024 * 1024


class GateState(Wire):
    open: bool
    epoch: int
    incarnation: str | None = None  # of the engine behind it
    version: Version | None = None
    in_flight: int = 0


class Closed(Wire):
    """This is the body of a 503. The caller keeps its request and sends it again when a gate is open."""

    error: str = "closed"
    epoch: int
