"""`python3 -m colocated_rl_trainer.ref_policy`: the reference of a job, on the devices of one pod.

Its ports answer before the model is loaded, which takes minutes; ready it is when every device has its copy. A pass
that finds no memory costs its questions an answer, and they may be asked again. After any other failure nobody knows a
device's state: the process ends, and kubelet starts it again.
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

from colocated_rl_api import names
from colocated_rl_api.logs import configure, failure_of, log
from colocated_rl_trainer.protocol.settings import ConfigError
from colocated_rl_trainer.ref_policy.figures import ScoreCounts
from colocated_rl_trainer.ref_policy.ports import MetricsPort, ScorePort
from colocated_rl_trainer.ref_policy.score_queue import ScoreQueue, ScoringFailed
from colocated_rl_trainer.ref_policy.settings import ReferenceSettings

if TYPE_CHECKING:
    from colocated_rl_trainer.ref_policy.scorer import Scorer

_LOG = logging.getLogger(__name__)


def main(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> int:
    """Serve until a device fails; its exit code. SIGTERM ends the process at once: there is nothing to tidy."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    configure(role=names.ROLE_REFERENCE, pod=environment.get(names.ENV_POD_NAME, ""))
    try:
        settings = ReferenceSettings.read(arguments)
        configure(job=settings.job.name, job_uid=settings.job.uid)
        return _serve(settings)
    except ConfigError as error:
        log(_LOG, "reference can't start", logging.ERROR, reason=str(error))
        return 2


def _serve(settings: ReferenceSettings) -> int:
    figures, desk = ScoreCounts(), ScoreQueue(settings.config.micro_batch_tokens)
    figures.count_waiting(lambda: desk.waiting)
    try:
        data = ScorePort(
            settings.host,
            settings.data_port,
            tls=settings.tls,
            desk=desk,
            deadline_s=settings.job.spec.switch.trainer_progress_seconds,
            figures=figures,
        )
        metrics = MetricsPort(
            settings.host, settings.metrics_port, is_ready=lambda: data.vocabulary is not None, figures=figures
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"ports can't be opened: {error}") from error
    data.listen("data")
    metrics.listen("metrics")
    log(_LOG, "reference started", devices=settings.devices, ports={"data": data.number, "metrics": metrics.number})
    return _compute(settings, desk, data, figures)


def _compute(settings: ReferenceSettings, desk: ScoreQueue, data: ScorePort, figures: ScoreCounts) -> int:
    from colocated_rl_trainer.ref_policy.scorer import Scorer

    began = time.monotonic()
    scorers = [Scorer(settings.model, device, settings.config) for device in settings.devices]
    ended: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    for device, scorer in zip(settings.devices, scorers, strict=True):
        work = (scorer, desk, figures, ended)
        threading.Thread(target=_work, args=work, name=device, daemon=True).start()
    data.vocabulary = scorers[0].vocabulary
    log(_LOG, "reference ready", took_s=round(time.monotonic() - began, 3))
    error = ended.get()
    reason = failure_of(error)
    _LOG.error("reference failed, its process ends", {"reason": reason}, exc_info=error)
    return 1


def _work(scorer: Scorer, desk: ScoreQueue, figures: ScoreCounts, ended: queue.SimpleQueue[BaseException]) -> None:
    """One device's, until it fails."""
    while True:
        questions = desk.take()
        try:
            with figures.passes_s.time():
                answers = scorer.score(questions)
        except ScoringFailed as error:
            figures.failed.inc()
            log(_LOG, "pass failed", logging.WARNING, samples=len(questions), reason=str(error))
            for question in questions:
                question.answer.set_exception(error)
        except BaseException as error:  # noqa: BLE001 - the last one: whatever it is, it ends the process
            for question in questions:
                question.answer.set_exception(ScoringFailed(f"{failure_of(error)}; this process ends"))
            ended.put(error)
            return
        else:
            for question, answer in zip(questions, answers, strict=True):
                question.answer.set_result(answer)


def _end(code: int) -> None:
    """Without the interpreter's own shutdown: threads of ports and devices may be anywhere."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _end(main(sys.argv[1:]))
