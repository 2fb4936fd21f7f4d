"""Define the requests to a reference: HTTP/1.1 on the data port of its pods, or of the engines' beside which it runs.

`POST /v1/score?start=N&temperature=T` (TLS, the job's data token): the body is a sample, prompt and response, as int32
in little-endian order. The answer, of `application/octet-stream`, is the log-probability of each token from place N
on, in nats, as float32 in little-endian order; logits are divided by T. It follows from the question alone, so it may
be asked again, of any pod. Everything else is answered with a `ScoreError`:

* 400: the question can't be answered by any reference of the job.
* 401: the data token is missing.
* 429: the port has no room: come again later.
* 503: not now; the model is being loaded, or a pass over the sample failed.

`GET /healthz`, `/readyz` and `/metrics` are on the metrics port: the process answers, the model is there, its figures.

Beside engines the process has a Unix socket, with `/v1/score` and `/readyz`, and the gate of their pod serves the first
of them to the job, for samples of up to `gate_wire.MAX_REQUEST_BYTES`.
"""

from __future__ import annotations

from colocated_rl_api.wire import Wire

SCORE_PATH = "/v1/score"
READY_PATH = "/readyz"
SCORE_TYPE = "application/octet-stream"
BYTES_OF_A_TOKEN = 4  # of an id, and of a log-probability
MAX_SAMPLE_BYTES = 64 * 1024 * 1024


class ScoreError(Wire):
    error: str  # CamelCase, stable
    message: str
