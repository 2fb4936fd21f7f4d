"""What every log line of a process has."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import logging, threading
from colocated_rl_api.logs import bind, configure, log
configure(role="operator")
configure(pod="colocated-rl-0")
with bind(job="sums"):
    log(logging.getLogger(), "mine")
    thread = threading.Thread(target=lambda: log(logging.getLogger(), "another's"))
    thread.start()
    thread.join()
"""


def test_what_is_true_of_a_process_is_in_the_lines_of_all_its_threads() -> None:
    """Lines of the thread that has the Lease named neither role nor pod: no filter found them."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    mine, others = (json.loads(line) for line in done.stdout.splitlines())
    assert {"role": "operator", "pod": "colocated-rl-0", "job": "sums"} == said(mine)
    assert {"role": "operator", "pod": "colocated-rl-0"} == said(others)


def said(line: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in line.items() if name in ("role", "pod", "job")}
