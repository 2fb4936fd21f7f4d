"""A trainer rank without torch: speaks `colocated_rl_api.trainer_wire` with the standard library, trains one number.

    python3 -m fakes.trainer      environment as `TrainerEnvironment`

The weight of version STEP-LINEAGE is STEP + LINEAGE / 8. Checkpoints are files named by their step, the model that it
leaves is a copy of its export. A test makes it fail by a file `fault` beside its socket, with one line ROUTE ACTION,
used once: ROUTE and crash, hang, slow, error, hopeless (it would fail again), held (until there is a file `go`) or
stall (the same, and told), and also `export torn`, `export lies` (the probe is of other weights), `offload leaks` (of
the device), `train leaks` (of the host) and `load unscoring`. A file `asked` there has the routes of all requests, in
order. With FAKE_DEVICE in its environment it says there what it holds of the device. Each step of the rank
FAKE_SLOW_RANK takes three seconds longer.
"""

from __future__ import annotations

import http.server
import json
import os
import shutil
import socketserver
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fakes.weights import write_export

PROTOCOL = 1
OFFLOADED_GB, ONLOADED_GB = 0.7, 60.0
LEAK_BYTES = 200 << 20
SLOW_STEP_S = 3.0
METRICS = {"loss": 0.5, "mismatch_mean": 0.125}


class FakeRank:
    """State of one rank, guarded by a lock: requests come in threads."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.socket = Path(environment["COLOCATE_TRAINER_SOCKET"])
        self.checkpoints = Path(environment["COLOCATE_CHECKPOINTS"])
        self.rank, self.lineage = int(environment["RANK"]), int(environment["COLOCATE_LINEAGE"])
        self.device = int(environment["LOCAL_RANK"])
        self.lock = threading.Lock()
        self.state = "Starting"
        self.step: int | None = None
        self.exported: str | None = None
        self.can_score = False
        self.scored: int | None = None
        self.saved: int | None = None
        self.can_mirror = "COLOCATE_MIRRORS" in environment
        self.mirrored: int | None = None
        self.mirror_fault = ""
        self.network_fault = ""
        self.finished: str | None = None
        self.standstill: dict[str, Any] | None = None
        self.kept = bytearray()

    def load(self) -> None:
        self.can_score = self.fail_if_told("load") != "unscoring"
        steps = [int(path.name.removeprefix("step-")) for path in self.checkpoints.glob("step-*")]
        self.saved = max(steps, default=None)
        self.hold(OFFLOADED_GB)
        self.step, self.state = self.saved or 0, "Offloaded"
        self.log("trainer loaded")

    def log(self, event: str, **fields: Any) -> None:
        """Write a line as a rank's process does."""
        line = {"ts": time.time(), "event": event, "rank": self.rank, "lineage": self.lineage, "step": self.step}
        print(json.dumps(line | fields), flush=True)  # noqa: T201 - its log

    def hold(self, gb: float) -> None:
        """Write down the memory for `fakes/device.c`."""
        if (directory := os.environ.get("FAKE_DEVICE")) is not None:
            (Path(directory) / f"{os.getpid()}.{self.device}").write_text(str(int(gb * 2**30)))

    def status(self) -> dict[str, Any]:
        return {
            "protocol": PROTOCOL, "state": self.state, "rank": self.rank, "lineage": self.lineage, "step": self.step,
            "canScore": self.can_score, "scored": self.scored, "dirty": False, "exported": self.exported,
            "saved": self.saved, "canMirror": self.can_mirror, "mirrored": self.mirrored,
            "mirrorFault": self.mirror_fault, "canFinish": True, "finished": self.finished, "metrics": METRICS,
            "standstill": self.standstill, "networkFault": self.network_fault,
        }  # fmt: skip

    def fail_if_told(self, route: str) -> str:
        """The fault for this route, taken away, by one of the ranks; crashes and hangs happen here."""
        path = self.socket.parent / "fault"
        try:
            asked, action = path.read_text().split()
            if asked != route:
                return ""
            path.unlink()
        except FileNotFoundError:
            return ""
        if action == "crash":
            try:
                raise RuntimeError("told to crash")
            except RuntimeError:
                traceback.print_exc()  # last words
            os._exit(17)
        if action == "slow":
            time.sleep(1.0)
        if action == "stall":
            self.standstill = {"seconds": 90.5, "usualS": 0.25, "moved": 3, "where": "all_reduce (group.py:7)"}
        while action in ("held", "stall") and not (self.socket.parent / "go").exists():
            time.sleep(0.01)
        self.standstill = None
        if action == "hang":
            threading.Event().wait()
        return action

    def answer(self, route: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        with self.lock:
            with (self.socket.parent / "asked").open("a") as asked:
                asked.write(f"{route}\n")
            fault = self.fail_if_told(route)
            if fault == "hopeless":
                return 500, {"error": "NotRetriable", "message": "the gradient is nan: lower learningRate"}
            if fault == "error":
                return 500, {"error": "ToldToFail", "message": f"{route} was told to fail"}
            getattr(self, route)(body, fault)
            return 200, self.status()

    def onload(self, body: dict[str, Any], fault: str) -> None:
        self.hold(ONLOADED_GB)
        self.state = "Onloaded"

    def offload(self, body: dict[str, Any], fault: str) -> None:
        self.hold(ONLOADED_GB if fault == "leaks" else OFFLOADED_GB)
        self.state = "Offloaded"

    def score(self, body: dict[str, Any], fault: str) -> None:
        assert self.state == "Onloaded", self.state
        assert Path(body["shard"]).stat().st_size > 0, body
        assert body["step"] == (self.step or 0) + 1 or body["step"] == self.scored, body
        Path(body["scores"]).touch()
        self.scored = body["step"]

    def train(self, body: dict[str, Any], fault: str) -> None:
        assert self.state == "Onloaded", self.state
        assert Path(body["shard"]).stat().st_size > 0, body
        assert body["step"] in (self.step, (self.step or 0) + 1), body
        assert self.scored in (None, body["step"]), "of a job with a reference, each batch is scored"
        if self.rank == int(os.environ.get("FAKE_SLOW_RANK", "-1")):
            time.sleep(SLOW_STEP_S)
        if self.step != body["step"]:
            self.step = body["step"]
            self.log("step trained", metrics=METRICS)
        if fault == "leaks":
            self.kept += b"x" * LEAK_BYTES

    def export(self, body: dict[str, Any], fault: str) -> None:
        assert self.state == "Onloaded", self.state
        assert self.step is not None
        directory = Path(body["directory"])
        weight = self.step + self.lineage / 8
        if self.device == 0:  # one rank of each pod writes
            write_export(directory, version=body["version"], weight=weight, probe_error=0.5 if fault == "lies" else 0.0)
        if fault == "torn":
            (directory / "model.safetensors").write_bytes(b"torn")
        self.exported = body["version"]

    def save(self, body: dict[str, Any], fault: str) -> None:
        assert self.state in ("Offloaded", "Onloaded"), self.state
        (self.checkpoints / f"step-{body['step']}").touch()
        self.saved = body["step"]

    def mirror(self, body: dict[str, Any], fault: str) -> None:
        assert self.can_mirror
        self.mirrored, self.mirror_fault = body["step"], "No space left on device" if fault == "full" else ""

    def finish(self, body: dict[str, Any], fault: str) -> None:
        assert body["version"] == f"{self.saved}-{self.lineage}", body
        if not Path(body["directory"]).is_dir():
            shutil.copytree(body["export"], body["directory"])
        self.finished = body["version"]


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    rank: FakeRank

    def do_GET(self) -> None:
        self.reply(200, self.rank.status())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.reply(*self.rank.answer(self.path.removeprefix("/v1/"), body))

    def reply(self, code: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        """Nothing: standard output is the test's."""

    def address_string(self) -> str:
        return "agent"


class RankSocketServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


def main() -> None:
    rank = FakeRank(os.environ)
    Handler.rank = rank
    server = RankSocketServer(str(rank.socket), Handler)
    threading.Thread(target=rank.load, daemon=True).start()
    server.serve_forever(poll_interval=60)


if __name__ == "__main__":
    main()
