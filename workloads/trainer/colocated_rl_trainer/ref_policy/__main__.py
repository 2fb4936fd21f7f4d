"""Run the reference of a job on the devices of one pod: `python3 -m colocated_rl_trainer.ref_policy`.

In a pod of its own it has ports, beside engines a socket for their agent. These answer before the model is loaded,
which takes minutes; it is ready when every device has its copy. A pass that runs out of memory fails its samples, and
callers may ask again. After any other failure the state of a device is unknown: the process ends, and kubelet or agent
starts it again.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from colocated_rl_api import descriptors, names
from colocated_rl_api.logs import configure, failure_of, log
from colocated_rl_trainer.protocol.settings import ConfigError
from colocated_rl_trainer.ref_policy.figures import ScoreCounts
from colocated_rl_trainer.ref_policy.ports import AgentSocket, MetricsPort, ScorePort
from colocated_rl_trainer.ref_policy.score_queue import ScoreQueue, ScoringFailed
from colocated_rl_trainer.ref_policy.score_requests import ScoreRequests
from colocated_rl_trainer.ref_policy.settings import ReferenceSettings

if TYPE_CHECKING:
    from colocated_rl_trainer.ref_policy.scorer import Scorer

_LOG = logging.getLogger(__name__)


def main(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> int:
    """Serve until a device fails; return the exit code. SIGTERM ends the process at once: nothing needs cleaning up."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    configure(role=names.ROLE_REFERENCE, pod=environment.get(names.ENV_POD_NAME, ""))
    descriptors.raise_limit()
    try:
        settings = ReferenceSettings.read(arguments)
        configure(job=settings.job.name, job_uid=settings.job.uid)
        return _serve(settings)
    except ConfigError as error:
        log(_LOG, "reference start failed", logging.ERROR, reason=str(error))
        return 2


def _serve(settings: ReferenceSettings) -> int:
    score_queue = ScoreQueue(settings.config.micro_batch_tokens)
    requests = ScoreRequests(score_queue, settings.job.spec.switch.trainer_progress_seconds, ScoreCounts())
    requests.figures.count_waiting(lambda: score_queue.waiting)
    try:
        where = _listen(settings, requests)
    except (OSError, ValueError) as error:
        raise ConfigError(f"it can't listen: {error}") from error
    log(_LOG, "reference started", devices=settings.devices, ports=where)
    return _compute(settings, requests)


def _listen(settings: ReferenceSettings, requests: ScoreRequests) -> dict[str, int | str]:
    """Serve requests from now on, and return where. Raises OSError, ValueError."""
    if settings.socket is not None:
        server = AgentSocket(settings.socket, requests)
        threading.Thread(target=server.serve_forever, name="socket", daemon=True).start()
        return {"socket": str(settings.socket)}
    data = ScorePort(settings.host, settings.data_port, tls=settings.tls, requests=requests)
    metrics = MetricsPort(settings.host, settings.metrics_port, requests=requests)
    data.listen("data")
    metrics.listen("metrics")
    return {"data": data.number, "metrics": metrics.number}


def _compute(settings: ReferenceSettings, requests: ScoreRequests) -> int:
    from colocated_rl_trainer.ref_policy.scorer import Scorer

    began = time.monotonic()
    scorers = [
        Scorer(settings.model, device, settings.config, of_shared=settings.is_of_shared) for device in settings.devices
    ]
    ended: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    for device, scorer in zip(settings.devices, scorers, strict=True):
        work = (scorer, requests.queue, requests.figures, ended)
        threading.Thread(target=_work, args=work, name=device, daemon=True).start()
    requests.vocabulary = scorers[0].vocabulary
    log(_LOG, "reference ready", took_s=round(time.monotonic() - began, 3))
    error = ended.get()
    reason = failure_of(error)
    _LOG.error("reference failed, its process ends", {"reason": reason}, exc_info=error)
    return 1


def _work(
    scorer: Scorer, score_queue: ScoreQueue, figures: ScoreCounts, ended: queue.SimpleQueue[BaseException]
) -> None:
    """Score on one device until it fails."""
    while True:
        samples = score_queue.take()
        try:
            with figures.passes_s.time():
                answers = scorer.score(samples)
        except ScoringFailed as error:
            figures.failed.inc()
            log(_LOG, "pass failed", logging.WARNING, samples=len(samples), reason=str(error))
            for sample in samples:
                sample.answer.set_exception(error)
        except BaseException as error:  # noqa: BLE001 - the outermost: whatever it is, it ends the process
            for sample in samples:
                sample.answer.set_exception(ScoringFailed(f"{failure_of(error)}; this process ends"))
            ended.put(error)
            return
        else:
            for sample, answer in zip(samples, answers, strict=True):
                sample.answer.set_result(answer)


def _end(code: int) -> None:
    """Skip the interpreter's own shutdown: threads of ports and devices may be anywhere."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _end(main(sys.argv[1:]))
