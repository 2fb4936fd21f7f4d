"""A reference on devices of its own, as its pod starts it, on this machine's loopback and CPU."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from colocated_rl_api import names
from colocated_rl_api.member_wire import Endpoint
from colocated_rl_trainer.conformance.ranks import free_port

START_S = 300.0  # torch and the model, ten seconds of a processor that others may share


class RunningReference:
    """One process, until its context ends.

    job: its file, which is rewritten for the model that stands in `model` and for a machine without GPUs.
    tls: as `names.TLS_DIR`. A model of the test's own, whatever the job says.
    """

    def __init__(self, folder: Path, job: Path, *, model: Path, config: Path, tls: Path) -> None:
        document = json.loads(job.read_bytes())
        document["spec"] |= {"gpus": {"count": 0}, "model": {"claim": {"name": "model", "path": model.name}}}
        file = folder / "job-of-reference.json"
        file.write_text(json.dumps(document))
        self._context = ssl.create_default_context(cafile=str(tls / names.CA_FILE))
        self._server_name = names.member_server_name(document["uid"])
        self._authorization = f"Bearer {(tls / names.DATA_TOKEN_FILE).read_text().strip()}"
        self.data_port, self.metrics_port = free_port(), free_port()
        words = [sys.executable, "-m", "colocated_rl_trainer.ref_policy", f"--job-file={file}", f"--config={config}"]
        words += [f"--models={model.parent}", f"--tls={tls}", "--host=127.0.0.1"]
        words += [f"--data-port={self.data_port}", f"--metrics-port={self.metrics_port}"]
        self.log = folder / "reference.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(words, stdout=log, stderr=log)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.terminate()
        self.process.wait(timeout=60)

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(pod="job-reference-0-0", address="127.0.0.1", port=self.data_port)

    def seen(self, path: str) -> tuple[int, str]:
        """Return status and body of a page of the metrics port."""
        connection = http.client.HTTPConnection("127.0.0.1", self.metrics_port, timeout=60)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def await_ready(self) -> None:
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            assert self.process.poll() is None, self.log.read_text()
            try:
                if self.seen("/readyz")[0] == 200:
                    return
            except OSError:
                pass  # not listening yet
            time.sleep(0.05)  # it tells nobody when it is
        raise AssertionError(f"not ready within {START_S} s: {self.log.read_text()}")

    def ask(self, path: str, body: bytes) -> tuple[int, bytes]:
        connection = http.client.HTTPSConnection("127.0.0.1", self.data_port, timeout=60)
        plain = socket.create_connection(("127.0.0.1", self.data_port), timeout=60)
        connection.sock = self._context.wrap_socket(plain, server_hostname=self._server_name)
        try:
            connection.request("POST", path, body, {"Authorization": self._authorization})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()
