"""The program as a person starts it: words, exit codes, what it prints, what it leaves behind.

kubectl is played by a program that joins the socket that it is told to a fake API server.
"""

from __future__ import annotations

import codecs
import copy
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import tarfile
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from waiting import DEADLINE_S

from builders import make_manifest
from colocated_rl_agent.metrics import GpuSeconds
from colocated_rl_api import names
from colocated_rl_api.bounded_json import REFUSED
from colocated_rl_api.holders import PodHolder
from colocated_rl_api.seats import FIRST_SPARE
from colocated_rl_cli import __main__ as program
from colocated_rl_cli import completion
from colocated_rl_cli.base.errors import Exit
from colocated_rl_cli.commands import RUN
from colocated_rl_cli.completion import complete
from colocated_rl_cli.document import page as page_of_commands
from colocated_rl_cli.draw.figures import read_figures
from colocated_rl_cli.parser import COMMANDS, build
from fakes.cluster_api import UNREACHED, ClusterApi, page
from fakes.kubectl import Played, play_kubectl
from setup.layout import CHECKOUT

RECORDED = json.loads((CHECKOUT.root / "tests/unit/records/run.json").read_text())

Run = Callable[..., "Done"]


@pytest.fixture
def api() -> ClusterApi:
    """A cluster with one job in rollout, of which all is known."""
    manifest = make_manifest("sums", replicas=1)
    job = {**manifest, "metadata": {**manifest["metadata"], "uid": "uid-1", "generation": 1}}
    job["status"] = {
        "observedGeneration": 1, "phase": "Rollout", "step": 2, "epoch": 4, "lineage": 1, "targetStep": 2,
        "cause": "NextStep", "rung": "Serving", "gpuHolder": "Rollout", "weightVersion": "2-1", "conditions": [],
        "evaluations": [
            {"name": "held-out", "step": 2, "mean": 0.5, "stderr": 0.01, "samples": 64},
            {"name": "aime", "step": 2, "mean": 0.1, "stderr": 0.02, "samples": 30},
        ],
    }  # fmt: skip
    api = ClusterApi(jobs={"sums": job}, pods=[_pod("gpu-0"), _pod("rollout")])
    recorded = [line for line in RECORDED["lines"] if line.get("pod") in ("arithmetic-gpu-0-0", "arithmetic-rollout-0")]
    for seat, container in (("gpu-0", "agent"), ("rollout", "rollout")):
        lines = [{**line, "pod": f"sums-{seat}-0"} for line in recorded if line["pod"] == f"arithmetic-{seat}-0"]
        api.logs[f"sums-{seat}-0", container] = "".join(json.dumps(line) + "\n" for line in lines)
    gpu = {
        "type": "podFacts", "epoch": 4, "gate": {"open": True, "settled": False},
        "engines": [{"name": "engine-0", "state": "Ready", "version": "2-1"}],
        "trainers": [{"rank": 0, "state": "Offloaded", "lineage": 1, "step": 2, "exported": "2-1"}],
    }  # fmt: skip
    target = {"epoch": 4, "goal": "Climb", "step": 2, "lineage": 1, "rung": "Serving"}
    rollout = {"type": "rolloutFacts", "epoch": 4, "gatesOpen": 1, "samples": {"completed": 3}}
    sample = {
        "id": 7,
        "group_id": 1,
        "prompt_index": 3,
        "state": "trained",
        "reason": "",
        "attempts": 1,
        "prompt": "1 + 1 = ?",
    }
    api.pages = {
        ("sums-gpu-0-0", "/v1/state"): page({"hello": {}, "target": target, "facts": gpu}),
        ("sums-rollout-0", "/v1/state"): page({"hello": {}, "target": None, "facts": rollout}),
        ("sums-rollout-0", "/v1/progress"): page({"facts": rollout, "sealed": None, "endedWithoutTraining": []}),
        ("sums-rollout-0", "/v1/samples"): page({"samples": [{**sample, "finish": "stop", "reward": 1.0, "step": 2}]}),
    }
    return api


def _pod(seat: str) -> dict[str, Any]:
    role, _, replica = seat.partition("-")
    labels = {names.ROLE_LABEL: role, names.ATTEMPT_LABEL: "0", **({names.REPLICA_LABEL: replica} if replica else {})}
    container: dict[str, Any] = {"name": "agent" if replica else "rollout", "state": {"running": {}}}
    return {
        "metadata": {"name": f"sums-{seat}-0", "uid": f"uid-{seat}", "labels": labels},
        "status": {"phase": "Running", "containerStatuses": [container]},
    }


@pytest.fixture
def kubectl(api: ClusterApi, tmp_path: Path) -> Iterator[Played]:
    with play_kubectl(api, tmp_path) as played:
        yield played


class Done(NamedTuple):
    code: int
    stdout: str
    stderr: str


@pytest.fixture
def run(kubectl: Played, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """The program in this process."""

    def run(*words: str) -> Done:
        return Done(program.run(words, kubectl.environment), *capsys.readouterr())

    return run


# ---------------------------------------------------------------------------------------------------------- its answers
def test_a_job_that_moves_is_explained_with_code_0(run: Run) -> None:
    done = run("explain", "sums")
    assert (Exit.FINE, "") == (done.code, done.stderr)
    assert "sums-gpu-0-0: Serving" in done.stdout
    assert "Nothing is wrong. It waits for: rollout fills batch 3: 3 of 8 samples finished" in done.stdout


def test_an_epoch_without_a_cause_has_none(run: Run, api: ClusterApi) -> None:
    """It was said to be None."""
    del api.jobs["sums"]["status"]["cause"]
    assert run("explain", "sums").stdout.startswith("default/sums: Rollout, step 2 of 3, epoch 4\n")


def test_a_job_is_explained_although_its_events_can_not_be_read(run: Run, api: ClusterApi) -> None:
    """Events may have a store of their own, which is away while all else answers: there was no explanation then."""
    api.refused["/events"] = 503
    done = run("explain", "sums")
    assert (Exit.FINE, True) == (done.code, "sums-gpu-0-0: Serving" in done.stdout)
    assert "note: events of namespace default: the API server is not reached" in done.stdout


def test_a_job_into_which_too_much_was_written_is_explained(run: Run, api: ClusterApi) -> None:
    """It stalls with InvalidSpec, and `explain`, which says so, ended with a traceback."""
    job = api.jobs["sums"]
    job["spec"]["rollout"] = REFUSED
    job["status"]["conditions"] = [
        {"type": "Stalled", "status": "True", "reason": "InvalidSpec", "message": "spec.rollout: not read",
         "lastTransitionTime": "2026-01-01T00:00:00Z"}
    ]  # fmt: skip
    done = run("explain", "sums")
    assert (Exit.PROBLEM, True) == (done.code, "InvalidSpec: the spec breaks a rule" in done.stdout)


@pytest.mark.parametrize("answer", ["[]", "3", '{"facts": []}', '{"facts": null}', "[" * 100_000, "1" * 5000])
def test_a_pod_that_answers_something_else_hides_no_other(run: Run, api: ClusterApi, answer: str) -> None:
    """One page that was no object ended `explain` for all pods with a traceback."""
    api.pages["sums-gpu-0-0", "/v1/state"] = f"HTTP/1.1 200 OK\n\n{answer}"
    done = run("explain", "sums")
    assert Exit.FINE == done.code
    assert "3 of 8 samples finished" in done.stdout, "as the rollout pod says"


@pytest.mark.parametrize("answer", [{}, [], {"samples": None}, {"samples": ["x"]}, {"samples": [{"reward": "x"}]}])
@pytest.mark.parametrize("more", [[], ["--text"], ["-o", "json"]], ids=" ".join)
def test_what_is_no_sample_is_not_shown_as_one(run: Run, api: ClusterApi, answer: Any, more: list[str]) -> None:
    """It ended the command with a traceback."""
    api.pages["sums-rollout-0", "/v1/samples"] = page(answer)
    done = run("samples", "sums", *more)
    assert (Exit.NO_ANSWER, "", 1) == (done.code, done.stdout, len(done.stderr.splitlines()))


@pytest.mark.parametrize("command", ["timeline", "eval", "top --once"])
def test_what_could_not_be_read_of_a_job_is_said(run: Run, api: ClusterApi, command: str) -> None:
    """A log that came not within 30 s, or whose node was away, was left out without a word."""
    word, *more = command.split()
    assert "" == run(word, "sums", *more).stderr, "no container has been there before those that run"
    api.pods[0]["status"]["containerStatuses"][0]["restartCount"] = 1
    api.refused["pods/sums-rollout-0/log"], api.refused["/events"] = 500, 403
    done = run(word, "sums", *more)
    assert Exit.FINE == done.code
    expected = (
        "not complete: log of container agent of pod sums-gpu-0-0: the API server answers 400",
        "not complete: log of container rollout of pod sums-rollout-0: the API server answers 500",
        "not complete: events of namespace default: ",
    )
    lines = done.stderr.splitlines()
    assert [True] * 3 == [line.startswith(each) for line, each in zip(lines, expected, strict=True)], lines


def test_what_is_no_log_line_in_a_log_is_passed_over(run: Run, api: ClusterApi) -> None:
    """A word in braces ended explain with a traceback."""
    api.logs["sums-gpu-0-0", "agent"] += '{not json}\n{"no": "moment"}\n'
    assert Exit.FINE == run("explain", "sums").code


@pytest.mark.parametrize("command", ["explain", "top --once", "timeline", "samples", "bundle --file"])
def test_a_pod_without_its_label_ends_no_command(run: Run, api: ClusterApi, command: str, tmp_path: Path) -> None:
    """Somebody took it away, and every command ended with a traceback: also the one for broken jobs."""
    del api.pods[0]["metadata"]["labels"][names.ROLE_LABEL]
    word, *options = command.split()
    done = run(word, "sums", *options, *([str(tmp_path / "sums.tar.gz")] if options == ["--file"] else []))
    assert (Exit.PROBLEM if word == "explain" else Exit.FINE) == done.code
    assert word != "explain" or "NoPod" in done.stdout


def test_a_job_that_does_not_move_is_explained_with_code_1(run: Run, api: ClusterApi) -> None:
    api.pods[0]["status"] = {
        "phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False", "message": "no room"}]
    }  # fmt: skip
    done = run("explain", "sums", "-o", "json")
    assert Exit.PROBLEM == done.code
    [cause] = json.loads(done.stdout)["causes"]
    assert ("Unschedulable", "no room", "sums-gpu-0-0") == (cause["reason"], cause["message"], cause["pod"])


def test_one_frame_of_top_has_the_pods_and_what_is_learned(run: Run) -> None:
    done = run("top", "sums", "--once")
    assert Exit.FINE == done.code, done.stderr
    for part in ("default/sums", "Rollout", "step 2 of 3", "sums-gpu-0-0", "Serving", "reward"):
        assert part in done.stdout


def counted(**hours: float) -> str:
    """Return an agent's page of metrics; names of holders have _ in the place of spaces."""
    held = {holder: hours.get(holder.replace(" ", "_").replace("-", "_"), 0.0) for holder in PodHolder}
    lines = (f'colocate_gpu_seconds_total{{holder="{holder}"}} {each * 3600}\n' for holder, each in held.items())
    return f"HTTP/1.1 200 OK\n\n{''.join(lines)}"


def cells(text: str) -> list[list[str]]:
    return [re.split(r" {3,}", line.strip()) for line in text.splitlines()]


def test_the_cost_of_a_job_is_its_gpu_hours_by_who_had_them(run: Run, api: ClusterApi) -> None:
    """The least that the same work would hold on GPUs of their own stands beside it: twice the longer side."""
    seconds = GpuSeconds(2, clock=iter(range(0, 100_000, 1800)).__next__)
    registry = CollectorRegistry()
    for holder in (PodHolder.ROLLOUT, PodHolder.SWITCH, PodHolder.ROLLOUT, PodHolder.TRAINER, PodHolder.BOTH):
        seconds.hold(holder)
    registry.register(seconds)
    figures = generate_latest(registry).decode()
    api.pages["sums-gpu-0-0", "/metrics"] = f"HTTP/1.1 200 OK\n\n{figures}"
    done = run("cost", "sums")
    assert (Exit.FINE, "") == (done.code, done.stderr)
    held = json.loads(run("cost", "sums", "-o", "json").stdout)
    assert {"start-up": 1.0, "rollout": 2.0, "switch": 1.0, "training": 1.0} == {
        holder: hours for holder, hours in held["held"].items() if holder != PodHolder.BOTH
    }
    both = held["held"][PodHolder.BOTH]
    assert (5.0 + both, 2 * (2.0 + both)) == (held["total"], held["separate"])
    assert len(held["held"]) == len(cells(done.stdout.split("\n\n")[0])) - len(("head", "sum"))


def test_a_table_says_what_sharing_gpus_saved_and_how_that_is_reckoned(run: Run, api: ClusterApi) -> None:
    api.pages["sums-gpu-0-0", "/metrics"] = counted(rollout=3.0, training=1.0, switch=0.5)
    holders, compared = run("cost", "sums").stdout.split("\n\n")
    assert [
        ["HOLDER", "GPU_SECONDS", "GPU_HOURS", "SHARE"],
        ["rollout", "10800", "3", "67%"],
        ["switch", "1800", "0.5", "11%"],
        ["training", "3600", "1", "22%"],
        ["sum", "16200", "4.5", "100%"],
    ] == cells(holders)
    assert [
        ["GPUS", "GPU_HOURS", "RECKONED"],
        ["colocated", "4.5", "the sum"],
        ["separate", "6", "2 x 3, the longer of both sides"],
        ["saved", "1.5", "25% of separate"],
    ] == cells(compared)
    api.pages["sums-gpu-0-0", "/metrics"] = counted(rollout=1.0, training=1.0, switch=0.5)
    assert ["saved", "-0.5", "-25% of separate"] == cells(run("cost", "sums").stdout)[-1]
    api.jobs["sums"]["status"]["placement"] = "Disaggregated"
    api.pods[0]["metadata"]["labels"][names.ROLE_LABEL] = names.ROLE_TRAINER
    assert "share no GPU in this job: there is nothing to compare" in run("cost", "sums").stdout
    assert json.loads(run("cost", "sums", "-o", "json").stdout)["saved"] is None


def test_of_engines_of_both_kinds_those_with_gpus_of_their_own_keep_them_on_both_sides(
    run: Run, api: ClusterApi
) -> None:
    """Such a job was said to share no GPU."""
    api.jobs["sums"]["status"]["placement"] = "Mixed"
    api.pods.append(_pod("engine-0"))
    api.pages["sums-gpu-0-0", "/metrics"] = counted(rollout=3.0, training=1.0, switch=0.5)
    api.pages["sums-engine-0-0", "/metrics"] = counted(rollout=4.0, switch=0.25)
    assert [
        ["GPUS", "GPU_HOURS", "RECKONED"],
        ["colocated", "8.75", "the sum"],
        ["separate", "10.25", "2 x 3, the longer of both sides, and 4.25 of GPUs that are not shared"],
        ["saved", "1.5", "15% of separate"],
    ] == cells(run("cost", "sums").stdout.split("\n\n")[1])
    assert 1.5 == json.loads(run("cost", "sums", "-o", "json").stdout)["saved"]


def test_a_job_that_is_over_costs_what_the_logs_of_its_pods_say(run: Run, api: ClusterApi) -> None:
    """Its pods answered nobody, and so it had cost nothing that anybody could ask for."""
    api.jobs["sums"]["spec"]["gpus"] = {"count": 2}
    api.jobs["sums"]["status"]["phase"] = "Complete"
    api.pods[0]["status"]["phase"] = "Succeeded"
    held = json.loads(run("cost", "sums", "-o", "json").stdout)["held"]
    lines = [json.loads(line) for line in api.logs["sums-gpu-0-0", "agent"].splitlines()]
    spans = read_figures(lines).spans
    assert {PodHolder.START, PodHolder.ROLLOUT, PodHolder.SWITCH, PodHolder.TRAINER} == held.keys()
    for holder, hours in held.items():
        expected = sum(span.end - span.start for span in spans if span.holder == holder)
        assert pytest.approx(2 * expected / 3600) == hours
    ended = {"ts": lines[-1]["ts"] + 7200, "event": "pod ended", "role": "gpu", "pod": "sums-gpu-0-0"}
    api.logs["sums-gpu-0-0", "agent"] += json.dumps(ended) + "\n"
    later = json.loads(run("cost", "sums", "-o", "json").stdout)["held"]
    assert pytest.approx(2 * 2.0) == later["rollout"] - held["rollout"], "it served for two hours more"
    api.pods[0]["metadata"]["labels"][names.REPLICA_LABEL] = str(FIRST_SPARE)
    spare = json.loads(run("cost", "sums", "-o", "json").stdout)["held"]
    assert {PodHolder.IDLE: pytest.approx(sum(later.values()))} == spare
    api.refused["/log"] = 403
    assert Exit.NO_ANSWER == run("cost", "sums").code


def test_the_cost_of_all_jobs_is_a_line_each_and_their_sum(run: Run, api: ClusterApi) -> None:
    other = copy.deepcopy(api.jobs["sums"])
    other["metadata"]["name"], other["status"] = "apart", {"phase": "Suspended", "placement": "Disaggregated"}
    api.jobs["apart"] = other
    api.pods[0]["metadata"]["labels"][names.JOB_NAME_LABEL] = "sums"
    api.pods.append(_pod("gpu-1"))
    api.pods[-1]["metadata"]["labels"][names.JOB_NAME_LABEL] = "apart"
    api.pages["sums-gpu-0-0", "/metrics"] = counted(rollout=3.0, training=1.0)
    api.pages["sums-gpu-1-0", "/metrics"] = counted(training=1.0, idle=2.0)
    done = run("cost")
    assert (Exit.FINE, "") == (done.code, done.stderr)
    assert [
        ["JOB", "PHASE", "GPU_HOURS", "ROLLOUT", "TRAINING", "IDLE", "SAVED"],
        ["sums", "Rollout", "4", "3", "1", "-", "2"],
        ["apart", "Suspended", "3", "-", "1", "2", "-"],
        ["sum", "-", "7", "3", "2", "2", "2"],
    ] == cells(done.stdout)
    everywhere = cells(run("cost", "-A").stdout)
    assert ["NAMESPACE", "JOB", "default", "sums", "sum", "2 jobs"] == [
        *everywhere[0][:2], *everywhere[1][:2], *everywhere[-1][:2]
    ]  # fmt: skip
    assert f"GET /apis/{names.API_VERSION}/{names.PLURAL}" in api.asked
    data = json.loads(run("cost", "--all-namespaces", "-o", "json").stdout)
    assert [("default/sums", 2.0), ("default/apart", None)] == [(each["job"], each["saved"]) for each in data]
    assert Exit.USAGE == run("cost", "sums", "-A").code


def test_a_job_that_nobody_answers_for_is_named_beside_the_cost_of_the_others(run: Run, api: ClusterApi) -> None:
    other = copy.deepcopy(api.jobs["sums"])
    other["metadata"]["name"] = "gone"
    api.jobs["gone"] = other
    api.pods[0]["metadata"]["labels"][names.JOB_NAME_LABEL] = "sums"
    api.pods.append(_pod("gpu-1"))
    api.pods[-1]["metadata"]["labels"][names.JOB_NAME_LABEL] = "gone"
    assert Exit.NO_ANSWER == run("cost").code
    api.pages["sums-gpu-0-0", "/metrics"] = counted(rollout=3.0)
    done = run("cost")
    assert Exit.FINE == done.code
    assert "default/gone: nobody answers: " in done.stderr
    assert ["gone", "Rollout", "-", "-", "-"] == cells(done.stdout)[2]
    api.jobs.clear()
    assert "there is no job in namespace default\n" == run("cost").stdout


def test_a_pod_that_gives_no_figures_is_named_beside_the_cost_of_the_others(run: Run, api: ClusterApi) -> None:
    done = run("cost", "sums")
    assert Exit.NO_ANSWER == done.code
    assert "sums-gpu-0-0" in done.stderr
    api.pods.append(_pod("gpu-1"))
    api.pages["sums-gpu-1-0", "/metrics"] = counted(rollout=2.0)
    done = run("cost", "sums")
    assert Exit.FINE == done.code
    assert "without pod sums-gpu-0-0" in done.stderr
    assert ["separate", "4", "2 x 2, the longer of both sides"] in cells(done.stdout)
    api.pages["sums-gpu-1-0", "/metrics"] = "HTTP/1.1 200 OK\n\n"
    assert "no pod of this job has a GPU" in run("cost", "sums").stdout


def test_samples_and_evaluations_are_tables_json_and_yaml(run: Run, api: ClusterApi) -> None:
    done = run("samples", "sums", "--state", "trained", "--limit", "5")
    assert ["ID", "GROUP_ID", "STATE", "REWARD", "FINISH", "ATTEMPTS", "STEP", "REASON"] == done.stdout.split()[:8]
    assert ["7", "1", "trained", "1", "stop", "1", "2", "-"] == done.stdout.splitlines()[1].split()
    assert b"GET /v1/samples?limit=5&state=trained HTTP/1.1" in api.forwarded[-1]
    words = run("samples", "sums", "--text").stdout
    assert ["7: trained, reward 1", "  prompt", "    1 + 1 = ?", "  response", "    -"] == words.splitlines()
    assert b"text=1" in api.forwarded[-1]
    run("samples", "sums", "--limit", "0")
    assert b"limit=0" in api.forwarded[-1]
    assert 7 == json.loads(run("samples", "sums", "-o", "json").stdout)[0]["id"]
    evaluated = run("eval", "sums").stdout.splitlines()
    assert [
        ["0", "held-out", "0.1855"],
        ["2", "held-out", "0.5"],
        ["2", "aime", "0.1"],
        ["10", "held-out", "0.7969"],
    ] == [line.split()[:3] for line in evaluated[1:5]]
    assert "step: 0" in run("eval", "sums", "-o", "yaml").stdout
    log, more = api.logs["sums-rollout-0", "rollout"], '"best": 0.9, "bestOf": [{"answers": 2, "mean": 0.4}]'
    api.logs["sums-rollout-0", "rollout"] = log.replace('"evaluation ended"', f'"evaluation ended", {more}')
    head, first, *_ = run("eval", "sums").stdout.splitlines()
    assert ["STEP", "SET", "MEAN", "STDERR", "BEST-OF-2", "BEST", "SAMPLES"] == head.split()
    assert ["0", "0.1855", "0.4", "0.9"] == [first.split()[at] for at in (0, 2, 4, 5)]


def test_a_timeline_can_be_kept_and_made_again_without_the_cluster(run: Run, kubectl: Played, tmp_path: Path) -> None:
    assert "sums-gpu-0-0" in run("timeline", "sums").stdout
    kept = [str(tmp_path / name) for name in ("kept.json", "page.html", "trace.json")]
    done = run("timeline", "sums", "--save", kept[0], "--html", kept[1], "--trace", kept[2])
    assert Exit.FINE == done.code, done.stderr
    again = str(tmp_path / "again.html")
    kubectl.end()
    assert Exit.FINE == run("timeline", "--records", kept[0], "--html", again).code
    assert Path(kept[1]).read_text() == Path(again).read_text()
    assert json.loads(Path(kept[2]).read_text())["traceEvents"]


def bundled(run: Run, folder: Path) -> tuple[set[str], str]:
    """Return the names in a job's support archive, and what it says of all that was not read."""
    done = run("bundle", "sums", "--file", str(folder / "sums.tar.gz"))
    assert Exit.FINE == done.code, done.stderr
    with tarfile.open(folder / "sums.tar.gz") as archive:
        inside = {name.removeprefix("sums-bundle/") for name in archive.getnames()}
        why = archive.extractfile("sums-bundle/not-read.txt")
        assert why is not None
        unread = why.read().decode()
    return inside, unread


def test_a_bundle_holds_everything_that_may_be_read(run: Run, api: ClusterApi, tmp_path: Path) -> None:
    api.refused["persistentvolumeclaims"] = 403
    inside, unread = bundled(run, tmp_path)
    assert {
        "README.txt", "job.yaml", "explanation.txt", "version.json", "events.yaml", "not-read.txt",
        "pods/sums-gpu-0-0.yaml", "pods/sums-gpu-0-0/agent.log", "pods/sums-gpu-0-0/state.json",
        "pods/sums-rollout-0.yaml", "pods/sums-rollout-0/rollout.log", "pods/sums-rollout-0/state.json",
        "pods/sums-rollout-0/progress.json",
    } == inside  # fmt: skip
    assert "claims.yaml: claims of job sums: " in unread
    assert "is refused; docs/cli.md lists the rights that each command needs" in unread
    assert "pods/sums-gpu-0-0/metrics.txt" in unread


def test_a_bundle_is_made_also_where_the_job_can_not_be_explained(run: Run, api: ClusterApi, tmp_path: Path) -> None:
    """There was no archive at all if events could not be read, though it says what was not."""
    api.refused["/events"] = 403
    inside, unread = bundled(run, tmp_path)
    assert {"job.yaml", "pods/sums-gpu-0-0.yaml", "pods/sums-gpu-0-0/agent.log"} <= inside
    assert ["events.yaml"] == [line.partition(":")[0] for line in unread.splitlines() if "/events" in line]
    assert "explanation.txt" in inside


def test_a_bundle_has_the_events_of_a_job_whose_pods_may_not_be_read(run: Run, api: ClusterApi, tmp_path: Path) -> None:
    """They were left out with those of the pods, and are what says why there is no pod."""
    api.events = [{"involvedObject": {"uid": "uid-1", "name": "sums"}, "reason": "ObjectRefused", "type": "Warning"}]
    api.refused["/pods"] = 403
    bundled(run, tmp_path)
    with tarfile.open(tmp_path / "sums.tar.gz") as archive:
        events = archive.extractfile("sums-bundle/events.yaml")
        assert events is not None
        assert b"ObjectRefused" in events.read()


@pytest.mark.parametrize("name", ["there.tar.gz", "no/folder.tar.gz"])
def test_a_bundle_that_can_not_be_written_reads_nothing(run: Run, api: ClusterApi, tmp_path: Path, name: str) -> None:
    """All logs of all pods were read before the file was looked at."""
    (tmp_path / "there.tar.gz").write_text("of yesterday")
    done = run("bundle", "sums", "--file", str(tmp_path / name))
    assert (Exit.USAGE, []) == (done.code, api.asked)
    assert "exists already: name another" in done.stderr or "is no folder that you may write to" in done.stderr
    assert "of yesterday" == (tmp_path / "there.tar.gz").read_text()


def test_jobs_with_one_side_alone_are_written_for_whoever_applies_them(run: Run, tmp_path: Path) -> None:
    done = run("rollout-only", "sums", "--steps", "2")
    assert (0, "") == (done.code, done.stderr)
    (tmp_path / "rollout.yaml").write_text(done.stdout)
    assert "fine: sums-rollout" in run("validate", str(tmp_path / "rollout.yaml")).stdout
    done = run("train-only", "sums")
    assert (2, "") == (done.code, done.stdout)
    assert "job sums keeps only batches that no checkpoint holds yet" in done.stderr
    file = str(tmp_path / "train.yaml")
    assert 0 == run("train-only", "sums", "--recorded", "copies:sums", "-f", file).code
    assert "fine: sums-train" in run("validate", file).stdout
    assert 2 == run("train-only", "sums", "--steps", "0").code


def test_a_job_is_suspended_and_resumed(run: Run, api: ClusterApi) -> None:
    spec = api.jobs["sums"]["spec"]
    assert "default/sums: not suspended already" in run("resume", "sums").stdout
    assert "default/sums: suspended: its pods end" in run("suspend", "sums").stdout
    assert {"suspend": True}.items() <= spec.items()
    assert "default/sums: resumed" in run("resume", "sums").stdout
    assert {"suspend": False}.items() <= spec.items()
    api.jobs["sums"]["status"]["phase"] = "Complete"
    done = run("suspend", "sums")
    assert (Exit.PROBLEM, True) == (done.code, "it is over (Complete)" in done.stderr)


@pytest.mark.parametrize("command", ["suspend", "resume", "retry"])
def test_a_job_that_is_being_deleted_is_not_steered(run: Run, api: ClusterApi, command: str) -> None:
    """It was said to be suspended, with its volumes kept."""
    api.jobs["sums"]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    done = run(command, "sums")
    assert (Exit.NO_ANSWER, "", True) == (done.code, done.stdout, "is being deleted" in done.stderr)
    assert "suspend" not in api.jobs["sums"]["spec"]


def test_a_failed_job_is_retried_and_no_other(run: Run, api: ClusterApi) -> None:
    job = api.jobs["sums"]
    done = run("retry", "sums")
    assert (Exit.PROBLEM, True) == (done.code, "default/sums: it has not failed" in done.stderr)
    assert "retries" not in job["spec"]
    job["status"] |= {"phase": "Failed", "retries": 3}
    assert "kubectl crlj retry sums continues it" in run("resume", "sums").stderr
    assert "default/sums: suspended" in run("suspend", "sums").stdout
    assert "default/sums: retried: its pods are recreated" in run("retry", "sums").stdout
    assert {"retries": 4, "suspend": False}.items() <= job["spec"].items()


# ------------------------------------------------------------------------------------------------------ what goes wrong
@pytest.mark.parametrize(
    ("refused", "message"),
    [
        ({"/sums": 403}, "is refused; docs/cli.md lists the rights"),
        ({"/sums": 401}, "log in again, as for kubectl"),
        ({"/sums": 503}, "the API server is not reached"),
        ({"/sums": 500}, "the API server answers 500"),
        ({"/sums": UNREACHED}, "kubectl reaches no API server: dial tcp 127.0.0.1:8080: connect: connection refused"),
    ],
)
def test_what_the_server_refuses_is_code_3_with_what_to_do(
    run: Run, api: ClusterApi, refused: dict[str, int], message: str
) -> None:
    api.refused = refused
    done = run("explain", "sums")
    assert (Exit.NO_ANSWER, "") == (done.code, done.stdout)
    assert done.stderr.startswith("colocated-rl explain: job default/sums: ")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_server_that_is_busy_is_asked_again_as_kubectl_does(run: Run, api: ClusterApi) -> None:
    """One 429 of a server under load ended every command, and left gaps in a bundle."""
    api.busy = 3
    assert "default/sums: suspended: its pods end" in run("suspend", "sums").stdout
    api.busy = 1000
    done = run("suspend", "sums")
    assert (Exit.NO_ANSWER, True) == (done.code, "the API server answers 429: too busy" in done.stderr)
    assert 1000 - 10 == api.busy


def test_a_job_that_is_not_there_is_code_3(run: Run) -> None:
    done = run("top", "nothing")
    assert (Exit.NO_ANSWER, True) == (done.code, '"nothing" not found' in done.stderr)


def test_a_member_that_can_not_be_reached_is_code_3_where_it_is_needed(
    run: Run, kubectl: Played, api: ClusterApi
) -> None:
    del api.pages["sums-rollout-0", "/v1/samples"]
    done = run("samples", "sums")
    assert Exit.NO_ANSWER == done.code
    assert "page /v1/samples of pod sums-rollout-0: connection refused on port 8080" in done.stderr


@pytest.mark.parametrize(
    ("phase", "is_suspended", "message"),
    [
        ("Complete", False, "is over, and has no pods: kubectl crlj reader sums makes one that serves its samples"),
        ("Failed", False, "is over, and has no pods: kubectl crlj reader sums makes one that serves its samples"),
        ("Suspended", True, "is suspended, and has no pods: kubectl crlj reader sums makes one"),
        ("Queued", False, "is queued, and has no pods: kubectl crlj reader sums makes one"),
        ("Pending", False, "kubectl crlj explain sums shows why"),
    ],
)
def test_a_job_without_a_rollout_pod_is_said_to_need_a_reader_or_to_be_explained(
    run: Run, api: ClusterApi, phase: str, is_suspended: bool, message: str
) -> None:
    """A job that was over was to be explained, which told nobody where its samples were."""
    job = api.jobs["sums"]
    job["status"]["phase"], job["spec"]["suspend"] = phase, is_suspended
    for pod in api.pods:
        pod["status"]["phase"] = "Succeeded"
    done = run("samples", "sums")
    assert Exit.NO_ANSWER == done.code
    assert message in done.stderr


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (
            {"portforward": 500},
            "the pod's node forwards no port (500): the pod ends, or the node is away; kubectl get pod",
        ),
        ({"portforward": 500, "pods/sums-rollout-0": UNREACHED}, "kubectl reaches no API server: dial tcp"),
        ({"portforward": 403}, "portforward is refused; docs/cli.md lists the rights"),
    ],
)
def test_a_port_that_is_not_forwarded_is_not_blamed_on_the_api_server(
    run: Run, api: ClusterApi, refused: dict[str, int], message: str
) -> None:
    """The node of a pod that had just ended answered 500, and people were told that kubectl reached no API server."""
    api.refused = refused
    done = run("samples", "sums")
    assert Exit.NO_ANSWER == done.code
    assert message in done.stderr


def test_without_the_right_to_forward_ports_the_job_is_explained_from_its_status(run: Run, api: ClusterApi) -> None:
    api.refused["portforward"] = 403
    done = run("explain", "sums")
    assert Exit.FINE == done.code
    assert "2 of 2 members' pages were not read, the status stands in" in done.stdout
    assert "portforward is refused" in done.stdout


@pytest.mark.parametrize(
    "words",
    [
        ["nothing"],
        ["explain"],
        ["top", "sums", "--twice"],
        ["timeline"],
        ["validate", "no-such-file"],
        ["validate", "/"],
        ["init", "a"],
        ["init", "sums", "--model", "m", "--task", "t", "--file", "/no/such/folder/job.yaml"],
        ["explain", "Sums"],
        ["explain", "pods/sums"],
        ["explain", "sums/status"],
        ["samples", "sums", "--limit", "-1"],
        ["timeline", "--records", sys.executable],
        ["timeline", "--records", "/dev/null"],
        [],
    ],
)
def test_wrong_words_are_code_2(run: Run, words: list[str]) -> None:
    done = run(*words)
    assert (Exit.USAGE, "") == (done.code, done.stdout)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["crlj/sums", "colocatedrljobs/sums", "colocatedrljobs.rl.colocate.dev/sums"])
def test_a_job_may_be_named_as_kubectl_names_objects(run: Run, name: str) -> None:
    assert "default/sums: not suspended already" in run("resume", name).stdout


@pytest.mark.parametrize("bytes_", [b"\xff\xfe", "steps: \u00b2".encode("latin-1")])
def test_what_is_no_utf8_is_code_2(kubectl: Played, bytes_: bytes) -> None:
    """The exit code is 2 also where Python would accept the bytes, because the locale names no encoding."""
    done = subprocess.run(
        [sys.executable, "-m", "colocated_rl_cli", "validate", "-"],
        env={**kubectl.environment, "LC_ALL": "C"}, input=bytes_, capture_output=True, check=False,
    )  # fmt: skip
    assert (Exit.USAGE, b"", 1) == (done.returncode, done.stdout, len(done.stderr.splitlines()))


def test_standard_input_that_is_named_twice_has_nothing_the_second_time(kubectl: Played) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "colocated_rl_cli", "validate", "-", "-"],
        env=kubectl.environment, input=b"kind: [", capture_output=True, check=False,
    )  # fmt: skip
    assert Exit.PROBLEM == done.returncode
    assert b"no ColocatedRLJob in it" in done.stdout + done.stderr
    assert b"Traceback" not in done.stderr


def test_a_page_is_utf8_whatever_the_locale_is(kubectl: Played, api: ClusterApi, tmp_path: Path) -> None:
    """It says so of itself, and a reason in another alphabet ended the command with a traceback."""
    error = {"ts": 1.0, "level": "error", "event": "failed", "reason": "\u4e8c", "pod": "sums-gpu-0-0"}
    api.logs["sums-gpu-0-0", "agent"] += json.dumps(error) + "\n"
    done = subprocess.run(
        [sys.executable, "-m", "colocated_rl_cli", "timeline", "sums", "--html", str(tmp_path / "page.html")],
        env={**kubectl.environment, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (Exit.FINE, True) == (done.returncode, done.stderr.endswith("page.html: written\n")), done.stderr
    assert "failed: \u4e8c" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_a_kubectl_that_is_no_command_line_is_code_2(run: Run, kubectl: Played) -> None:
    kubectl.environment["KUBECTL"] = "kubectl '--as=me"
    done = run("top", "sums")
    assert (Exit.USAGE, True) == (done.code, "KUBECTL is no command line: No closing quotation" in done.stderr)
    assert "" == run("__complete", "top", "s").stdout


def test_a_character_that_the_locale_lacks_is_shown_by_its_number(kubectl: Played, api: ClusterApi) -> None:
    """One sample of an alphabet that the terminal does not have ended the command in a traceback."""
    sample = {"id": 7, "state": "trained", "reward": 1.0, "prompt": "1 + 1 = ?", "response": "\u4e8c"}
    api.pages["sums-rollout-0", "/v1/samples"] = page({"samples": [sample]})
    done = subprocess.run(
        [sys.executable, "-m", "colocated_rl_cli", "samples", "sums", "--text"],
        env={**kubectl.environment, "PYTHONIOENCODING": "latin-1"}, capture_output=True, check=False,
    )  # fmt: skip
    assert (Exit.FINE, b"") == (done.returncode, done.stderr)
    assert b"    \\u4e8c" in done.stdout.splitlines()


WRITERS = (["--help"], ["completion", "bash"], ["top", "sums"], ["explain", "sums", "-o", "json"])


@pytest.mark.parametrize("words", WRITERS, ids=" ".join)
def test_who_reads_no_further_makes_no_noise(kubectl: Played, words: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "colocated_rl_cli", *words],
        env=kubectl.environment, stdout=writing, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    os.close(writing)
    assert (Exit.FINE, b"") == (done.returncode, done.stderr)


@pytest.mark.parametrize("name", [".", "/tmp"])
def test_samples_are_not_asked_for_where_a_folder_is_in_the_place_of_their_file(
    run: Run, api: ClusterApi, name: str
) -> None:
    """It was known only when all had come, and `.` was a traceback."""
    done = run("samples", "sums", "--parquet", name)
    assert (Exit.USAGE, []) == (done.code, api.forwarded)
    assert f"'{name}' is a directory" in done.stderr


def test_what_can_not_be_written_is_code_2(kubectl: Played) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "colocated_rl_cli", "completion", "bash"],
            env=kubectl.environment, stdout=full, stderr=subprocess.PIPE, check=False,
        )  # fmt: skip
    assert (Exit.USAGE, 1) == (done.returncode, len(done.stderr.splitlines()))
    assert b"No space left on device" in done.stderr


def test_without_kubectl_it_says_so(run: Run, tmp_path: Path, kubectl: Played) -> None:
    del kubectl.environment["KUBECTL"]
    kubectl.environment["PATH"] = str(tmp_path)
    done = run("top", "sums")
    assert Exit.NO_ANSWER == done.code
    assert "there is no kubectl on PATH, which logs in to the cluster: install it" in done.stderr


def test_what_kubectl_complains_of_is_reported(run: Run, tmp_path: Path, kubectl: Played) -> None:
    complains = tmp_path / "complains"
    complains.write_text("#!/bin/sh\necho 'error: context \"x\" does not exist' >&2\nexit 1\n")
    complains.chmod(0o755)
    kubectl.environment["KUBECTL"] = str(complains)
    for words, to_do in (([], "use-context"), (["--context", "x"], "get-contexts"), (["-n", "default"], "")):
        done = run("top", "sums", *words)
        assert Exit.NO_ANSWER == done.code
        assert 'context "x" does not exist' in done.stderr
        assert to_do in done.stderr


# ------------------------------------------------------------------------------------------------ what it leaves behind
def test_context_and_namespace_are_kubectls(run: Run, kubectl: Played) -> None:
    run("top", "sums", "--once", "--context", "other", "--kubeconfig", "some/file")
    run("--context", "other", "--kubeconfig", "some/file", "top", "sums", "--once")
    assert 4 == len(kubectl.calls())
    for words in kubectl.calls():
        assert {"--context=other", "--kubeconfig=some/file"} <= set(words)


def test_the_namespace_may_stand_before_the_command_or_after_it(run: Run) -> None:
    for words in (["-n", "team", "explain", "sums"], ["explain", "sums", "--namespace", "team"]):
        assert "colocated-rl explain: job team/sums: " in run(*words).stderr


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_kubectl_ends_with_it_however_it_ends(kubectl: Played, ending: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "colocated_rl_cli", "top", "sums"],
        env=kubectl.environment, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        process.stdout.readline()  # a first event: it follows
        assert kubectl.is_running()
        process.send_signal(ending)
        code = process.wait(DEADLINE_S)
    assert code == (-signal.SIGKILL if ending is signal.SIGKILL else Exit.INTERRUPTED)
    until = time.monotonic() + DEADLINE_S
    while kubectl.is_running():
        assert time.monotonic() < until, "kubectl goes on"
        time.sleep(0.01)  # another process ends: nothing to await


# -------------------------------------------------------------------------------------------------------- on a terminal
class Screen:
    """A terminal of a given size on which a program runs, and what it wrote."""

    def __init__(self, command: list[str], environment: dict[str, str], *, columns: int, rows: int) -> None:
        self._typed, terminal = pty.openpty()
        self.resize(columns, rows)
        self.process = subprocess.Popen(
            command, env=environment | {"TERM": "xterm-256color"}, stdin=terminal, stdout=terminal, stderr=terminal,
            start_new_session=True,
        )  # fmt: skip
        os.close(terminal)
        self.written = ""
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode  # a character may come in two pieces
        self._is_gone = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(DEADLINE_S)
        if not self._is_gone:
            os.close(self._typed)

    def hang_up(self) -> None:
        self._is_gone = True
        os.close(self._typed)

    def type(self, text: str) -> None:
        os.write(self._typed, text.encode())

    def _read(self) -> None:
        while not self._is_gone:
            try:
                if select.select([self._typed], [], [], 0.05)[0]:
                    self.written += self._decode(os.read(self._typed, 1 << 16))
            except (OSError, ValueError):  # the program has ended, or the terminal is gone
                return

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._typed, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def wait_for(self, pattern: str, *, after: int = 0) -> int:
        """Return where a pattern ended in the output."""
        until = time.monotonic() + DEADLINE_S
        while (found := re.compile(pattern, re.DOTALL).search(self.written, after)) is None:
            assert time.monotonic() < until, f"not seen: {pattern}\n{self.written[-3000:]}"
            time.sleep(0.01)  # a terminal has no event for what is on it
        return found.end()


def test_top_uses_the_whole_screen_follows_its_size_and_gives_it_back(kubectl: Played, api: ClusterApi) -> None:
    command = [sys.executable, "-m", "colocated_rl_cli", "top", "sums"]
    with Screen(command, kubectl.environment, columns=100, rows=30) as screen:
        at = screen.wait_for(r"\x1b\[\?1049h.*default/sums ─+╮.*sums-gpu-0-0 .*Serving")
        assert 100 == max(len(line) for line in re.findall(r"╭.*?╮", screen.written))
        screen.resize(70, 20)
        screen.wait_for(r"╭─ default/sums ─{53}╮", after=at)
        assert "\x1b[2J" not in screen.written[at:], "a screen that is cleared flickers"
        api.jobs["sums"]["status"] |= {"phase": "Complete", "step": 3}
        kubectl.change()
        assert Exit.FINE == screen.process.wait(DEADLINE_S)
        screen.wait_for(r"\x1b\[\?1049l.*Complete.*step 3 of 3")


def test_top_reads_the_log_of_a_pod_that_has_ended_once(kubectl: Played, api: ClusterApi) -> None:
    """All of it was read again twice a second, for as long as somebody looked on."""
    ended = _pod("gpu-0")
    ended["metadata"] |= {"name": "sums-gpu-0-1", "uid": "uid-ended"}
    ended["status"] = {"phase": "Failed", "containerStatuses": [{"name": "agent", "state": {"terminated": {}}}]}
    api.pods.insert(0, ended)
    lines = api.logs["sums-gpu-0-0", "agent"]
    api.logs["sums-gpu-0-1", "agent"] = lines.replace("sums-gpu-0-0", "sums-gpu-0-1")

    def reads(pod: str) -> int:
        return api.asked.count(f"GET /api/v1/namespaces/default/pods/{pod}/log")

    command = [sys.executable, "-m", "colocated_rl_cli", "top", "sums"]
    with Screen(command, kubectl.environment, columns=100, rows=30) as screen:
        screen.wait_for("sums-gpu-0-1 .*Serving")
        until = time.monotonic() + DEADLINE_S
        while reads("sums-gpu-0-0") < 4:  # the fake ends a log at once, as a container that ends does
            assert time.monotonic() < until, "a pod that runs is followed"
            time.sleep(0.01)  # another process asks: nothing to await
        screen.process.terminate()
    assert 1 == reads("sums-gpu-0-1")


def test_top_ends_when_its_terminal_is_gone(kubectl: Played) -> None:
    command = [sys.executable, "-m", "colocated_rl_cli", "top", "sums"]
    with Screen(command, kubectl.environment, columns=100, rows=30) as screen:
        screen.wait_for("sums-gpu-0-0 .*Serving")
        screen.hang_up()
        screen.process.wait(DEADLINE_S)


def test_top_ends_when_its_job_was_deleted_while_nobody_watched(kubectl: Played, api: ClusterApi) -> None:
    """A watch that begins anew says nothing of a job that is gone: its last frame stayed, as if all were well."""
    command = [sys.executable, "-m", "colocated_rl_cli", "top", "sums"]
    with Screen(command, kubectl.environment, columns=120, rows=30) as screen:
        screen.wait_for("default/sums ─.*sums-gpu-0-0 .*Serving")  # its watches of job and pods are open
        api.refused |= {names.PLURAL: 503, "/sums": 503}  # the list, which is watched, and the job
        api.is_ending = True
        kubectl.change()
        screen.wait_for("not up to date: job default/sums: the API server is not reached")
        api.jobs.clear()
        api.is_ending = False
        api.refused.clear()
        assert Exit.FINE == screen.process.wait(DEADLINE_S)


@pytest.mark.parametrize("is_too_old", [False, True], ids=["told by the watch", "version too old for a watch"])
def test_top_ends_when_its_job_is_deleted_as_its_watch_begins(
    kubectl: Played, api: ClusterApi, *, is_too_old: bool
) -> None:
    """A watch from now on says nothing of a job that was deleted since it was read: top never ended."""

    def delete() -> None:
        api.jobs.clear()
        if is_too_old:
            api.versions.clear()

    api.before_watch = delete
    command = [sys.executable, "-m", "colocated_rl_cli", "top", "sums"]
    with subprocess.Popen(command, env=kubectl.environment, stdin=subprocess.DEVNULL) as process:
        try:
            assert Exit.FINE == process.wait(DEADLINE_S)
        finally:
            process.kill()


def test_top_says_when_it_is_not_up_to_date_and_goes_on_when_the_server_is_back(
    kubectl: Played, api: ClusterApi
) -> None:
    command = [sys.executable, "-m", "colocated_rl_cli", "top", "sums"]
    with Screen(command, kubectl.environment, columns=120, rows=30) as screen:
        screen.wait_for("default/sums ─.*sums-gpu-0-0 .*Serving")  # its watches of job and pods are open
        api.refused[names.PLURAL], api.is_ending = 503, True
        kubectl.change()
        at = screen.wait_for("not up to date: job default/sums: the API server is not reached")
        api.refused.clear()
        api.is_ending = False
        api.jobs["sums"]["status"] |= {"phase": "Complete", "step": 3}
        screen.wait_for(r"\x1b\[\?1049l.*Complete.*step 3 of 3", after=at)
        assert Exit.FINE == screen.process.wait(DEADLINE_S)


def test_nothing_is_asked_for_a_file_that_is_there(run: Run, tmp_path: Path) -> None:
    """It was said after the last answer."""
    (tmp_path / "job.yaml").write_text("mine")
    done = run("init", "--file", str(tmp_path / "job.yaml"))
    assert (Exit.USAGE, True) == (done.code, "exists already: name another file, or use --force" in done.stderr)
    words = ("init", "sums", "--model", "m", "--task", "chain_sum", "--file", str(tmp_path / "job.yaml"))
    assert (Exit.USAGE, "mine") == (run(*words).code, (tmp_path / "job.yaml").read_text())
    assert Exit.FINE == run(*words, "--force").code
    assert "name: sums" in (tmp_path / "job.yaml").read_text()


def test_questions_are_asked_on_a_terminal(kubectl: Played, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    command = [sys.executable, "-m", "colocated_rl_cli", "init", "--file", str(file)]
    with Screen(command, kubectl.environment, columns=100, rows=30) as screen:
        for question, answer in (("name of the job", "sums"), ("claim that holds the model", "m"), ("chain_sum", "")):
            screen.wait_for(question)
            screen.type(f"{answer}\n")
        assert Exit.FINE == screen.process.wait(DEADLINE_S), screen.written
        assert "name: chain_sum" in file.read_text()


# ------------------------------------------------------------------------------------------------------------ its words
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["ex"], ["explain"]),
        (["explain", "-"], ["--context", "--help", "--kubeconfig", "--namespace", "--output"]),
        (["explain", "sums", "-o", ""], ["json", "text", "yaml"]),
        (["samples", "sums", "--state", "tr"], ["trained"]),
        (["completion", ""], ["bash", "fish", "zsh"]),
        (["nothing", ""], []),
        (["-n", "team", "ex"], ["explain"]),
        (["-n", "team", "samples", "sums", "--state", "tr"], ["trained"]),
    ],
)
def test_words_are_completed(words: list[str], expected: list[str]) -> None:
    assert expected == complete(build("colocated-rl"), words, {})


def test_names_of_jobs_are_completed_from_the_cluster(
    run: Run, kubectl: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completion, "NAMES_DEADLINE_S", DEADLINE_S)
    assert ["sums"] == run("__complete", "explain", "s").stdout.split()
    words = (
        f"import sys; from colocated_rl_cli import completion; completion.NAMES_DEADLINE_S = {DEADLINE_S};"
        "from colocated_rl_cli.__main__ import complete; sys.exit(complete())"
    )
    done = subprocess.run(
        [sys.executable, "-c", words, "top", ""], env=kubectl.environment, capture_output=True, text=True, check=True
    )
    assert ["sums", ":4"] == done.stdout.split()


def test_bash_completes_words(run: Run, tmp_path: Path) -> None:
    named = tmp_path / "colocated-rl"
    named.write_text(f'#!/bin/sh\nexec {sys.executable} -m colocated_rl_cli "$@"\n')
    named.chmod(0o755)
    typed = 'COMP_WORDS=(colocated-rl samples sums --state t); COMP_CWORD=4; _colocated_rl; echo "${COMPREPLY[@]}"'
    done = subprocess.run(
        ["bash", "-c", f"{run('completion', 'bash').stdout}\n{typed}"],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "trained\n" == done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script(run: Run, shell: str) -> None:
    assert "colocated-rl __complete" in run("completion", shell).stdout


def test_help_and_completion_load_no_library() -> None:
    """Each took a second: aiohttp, rich and the models were loaded to print words."""
    libraries = {"aiohttp", "asyncio", "pydantic", "rich", "yaml"}
    for words in (["--help"], ["explain", "--help"], ["__complete", "explain", "sums", "-"]):
        run = f"import sys; from colocated_rl_cli.__main__ import run; run({words}, {{}});"
        report = f"sys.stderr.write(' '.join(sys.modules.keys() & {libraries}))"
        done = subprocess.run([sys.executable, "-c", run + report], capture_output=True, text=True, check=True)
        assert ("", True) == (done.stderr, bool(done.stdout))


def test_every_command_explains_itself() -> None:
    assert [*RUN] == [command.name for command in COMMANDS]
    assert all(command.summary[0].islower() and not command.summary.endswith(".") for command in COMMANDS)


def test_the_page_says_of_every_command_which_rights_it_needs() -> None:
    """An answer of 403 sends people there, and `retry` was missing."""
    rights, _, _ = page_of_commands().partition("## Commands")
    assert [] == [command.name for command in COMMANDS if f"`{command.name}`" not in rights]


def test_the_page_of_the_documentation_is_as_generated() -> None:
    words = [sys.executable, "-m", "colocated_rl_cli.document", "--check", "--root", str(CHECKOUT.root)]
    assert "" == subprocess.run(words, capture_output=True, text=True, check=True).stderr
