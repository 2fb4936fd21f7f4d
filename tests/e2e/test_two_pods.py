"""One job of two pods with real engines and trainers, from its first climb to its deletion, with faults on the way.

The tests run in the order of this file on the same job: each leaves it going. What happened is read from the members'
own log lines, facts and files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from documents.blocks import blocks, under
from e2e.conftest import OPERATOR_NAMESPACE, CommandLine, apply
from e2e.pod_network import OPEN_PORTS
from e2e.running_job import KubectlCall, Line, RunningJob, reached, wait_for
from e2e.terminal import RecordedTerminal

from colocated_rl_api import names
from colocated_rl_api.ladder import TIME_SLICED
from colocated_rl_api.rungs import Rung
from colocated_rl_trainer.conformance.ranks import free_port
from setup.layout import CHECKOUT

START_S = 900  # two engines and two trainers start on two cores
STEPS_S = 400  # a few steps
SEEN_S = 120  # by an agent, in the status
ENGINE = "sglang"  # in the command lines of an engine's processes
TRAINER = "colocated_rl_trainer"
ONE_GPU = "docs/first-gpu-job.md"
SUCCEEDED_S = 240  # kubelet may look at a pod once a minute
DELETED_S = 240

BEYOND = {
    Rung.PAUSED: ["Flush"],
    Rung.DRAINED: ["Release"],
    Rung.RELEASED: ["Onload", "Train"],
    Rung.TRAINED: ["Export"],
    Rung.EXPORTED: ["Offload", "Resume", "Update"],
    Rung.UPDATED: ["Continue", "CheckProbe"],
}
"""These actions lie beyond a barrier: no pod may begin one before every pod stands at the barrier."""
WAY_BACK = ["Resume", "Update", "Resume", "Continue", "CheckProbe"]
"""An engine of this job goes through these once in each switch after its release, in this order."""


@pytest.fixture(scope="module")
def job(kubectl: KubectlCall) -> RunningJob:
    """Has done three steps without a fault."""
    running = apply(kubectl, "two-pods.yaml")
    running.wait_for_step(3, deadline_s=START_S)
    return running


# ------------------------------------------------------------------------------------------------------ without faults
def test_every_step_climbs_the_ladder_in_order_over_both_pods(job: RunningJob) -> None:
    for step in (1, 2, 3):
        assert_climbed_in_order(job, step)


def test_f31_f39_every_engine_is_updated_once_in_each_step_and_in_the_same_order(job: RunningJob) -> None:
    lines = job.agent_lines("action ended")
    for step in (1, 2, 3):
        for pod in job.gpu_pods:
            done = [line for line in lines if line.pod == pod and line.fields.get("step") == step]
            ordered = [line.fields["action"] for line in sorted(done, key=lambda line: line.began)]
            assert WAY_BACK == [action for action in ordered if action in WAY_BACK], f"{pod} in step {step}"


def test_f10_no_process_is_started_again_from_one_step_to_the_next(job: RunningJob) -> None:
    first = processes_of(job)
    assert all(found["first"] for found in first.values()), first
    for pod in job.gpu_pods:
        assert first[f"{pod}/{names.GPU_CONTAINER}"].keys() == {"first", "engine", "trainer"}
        assert all(first[f"{pod}/{names.GPU_CONTAINER}"].values()), first
    job.wait_for_step(job.step + 2, deadline_s=STEPS_S)
    assert first == processes_of(job)
    started = [line.pod for line in job.agent_lines("engine started")]
    assert job.gpu_pods == sorted(started), "each engine was started once in its job's life"


def test_f4_requests_in_flight_are_aborted_at_the_engines_when_a_switch_begins(job: RunningJob) -> None:
    """The gate is closed, so nothing comes in between; what was aborted comes back, and is resumed."""
    aborts = [line for line in job.agent_lines("action ended") if line.fields["action"] == "AbortAll"]
    assert aborts, "no switch of this job had anything in flight"
    assert {0} == {line.fields["in_flight"] for line in aborts}
    for line in aborts:
        lines = [rung for rung in job.rungs(line.fields["step"]) if rung.pod == line.pod]
        assert reached(lines, line.pod, Rung.CLOSED) <= line.began + CLOCK_S
        assert reached(lines, line.pod, Rung.SETTLED) >= line.began - TURN_S, "answers may come before the abort's own"
    assert wait_for(
        "an interrupted sample in a batch",
        lambda: resumed_samples(job),
        deadline_s=STEPS_S,
        explain=job.describe,
    )


def test_f73_columns_show_the_step_and_where_it_stands(job: RunningJob) -> None:
    def row_between_two_looks() -> list[str] | None:
        before, table, after = job.status, job.kubectl("get", names.PLURAL, job.name, "-o", "wide"), job.status
        header, row = (line.split() for line in table.splitlines())
        shown = dict(zip(header, row, strict=True))
        columns = {"STEP": "step", "READY": "readyReplicas", "REPLICAS": "replicas", "VERSION": "weightVersion"}
        assert columns.keys() | {"PHASE", "HOLDER", "RUNG", "REWARD", "STALENESS", "LAST-SWITCH"} <= shown.keys()
        found = [shown[column] for column in columns]
        return found if [str(before[key]) for key in columns.values()] == found == [
            str(after[key]) for key in columns.values()
        ] else None  # fmt: skip

    wait_for("columns of one moment", row_between_two_looks, deadline_s=STEPS_S, explain=job.describe)


def test_processes_of_a_pod_have_what_its_job_says_of_it(job: RunningJob) -> None:
    code = "import os; print(os.environ['TEAM'], os.environ['HF_HOME'], os.access('/cache', os.W_OK))"
    assert "sums /cache True" == job.python(job.gpu_pods[1], names.GPU_CONTAINER, code).strip()


def test_h65_a_pod_listens_at_no_port_of_an_engine_but_its_store(job: RunningJob) -> None:
    """Beside its own three ports and the one at which its trainer listens to its peers."""
    own = {names.CONTROL_PORT, names.DATA_PORT, names.METRICS_PORT}
    open_ports = set(json.loads(job.python(job.gpu_pods[1], names.GPU_CONTAINER, OPEN_PORTS)))
    assert own < open_ports
    assert 2 == len(open_ports - own)


def test_no_pod_goes_beyond_a_barrier_while_another_is_slow(job: RunningJob) -> None:
    with slowed(job, job.gpu_pods[1]):
        first = job.step + 2  # begun while the pod was slow
        job.wait_for_step(first, deadline_s=STEPS_S)
    job.wait_for_step(first + 1, deadline_s=STEPS_S)  # a step is in the status once it is trained, before it is served
    assert_climbed_in_order(job, first)


def test_nothing_is_in_flight_from_release_until_the_gate_opens(job: RunningJob) -> None:
    releases = [line for line in job.agent_lines("action ended") if line.fields["action"] == "Release"]
    assert len(releases) >= 2 * 3
    assert {0} == {line.fields["in_flight"] for line in releases}
    off = {"Release", "Onload", "Train", "Export", "VerifyExport", "Offload", "Resume", "Update"}
    while_off = [line for line in job.agent_lines("action ended") if line.fields["action"] in off]
    assert {0} == {line.fields["in_flight"] for line in while_off}


def test_a_generation_that_spans_a_switch_comes_back_as_one_completion(job: RunningJob) -> None:
    found = wait_for(
        "a sealed sample with tokens of two versions",
        lambda: batches if (batches := read_batches(job))["spanning"] else None,
        deadline_s=STEPS_S,
        explain=job.describe,
    )
    assert found["spanning_in_order"] == found["spanning"], "a later token was made by older weights"
    wait_for(
        "the log to say so, which comes after the file",
        lambda: resumed_samples(job) >= found["spanning"],
        deadline_s=SEEN_S,
        explain=job.describe,
    )


def test_every_trained_token_has_a_version_and_a_log_probability(job: RunningJob) -> None:
    found = wait_for(
        "two sealed batches that no checkpoint holds yet",
        lambda: batches if (batches := read_batches(job))["batches"] >= 2 else None,
        deadline_s=STEPS_S,
        explain=job.describe,
    )
    assert found["policy_tokens"] > 0
    assert found["policy_tokens"] == found["with_version"] == found["with_logp"]
    assert 0 <= found["min_staleness"] <= found["max_staleness"] <= 1


def test_every_sample_is_in_exactly_one_state(job: RunningJob) -> None:
    step = job.step
    seen = []

    def look() -> bool:
        seen.append(read_accounts(job))
        return job.step >= step + 3

    wait_for("three more steps", look, deadline_s=STEPS_S, explain=job.describe)
    for accounts in seen:
        assert accounts["admitted_ever"] == sum(accounts["by_state"].values()) + accounts["retired"]
        assert accounts["samples_of_no_group"] == 0


def test_the_command_line_shows_the_job_as_it_is(job: RunningJob, command_line: CommandLine, tmp_path: Path) -> None:
    explanation = json.loads(command_line("explain", job.name, "--output", "json"))
    assert (False, []) == (explanation["isProblem"], explanation["notes"])
    assert set(job.gpu_pods) == explanation["rungs"].keys()
    shown = command_line("top", job.name, "--once")
    assert all(pod in shown for pod in job.gpu_pods)
    states = {sample["state"] for sample in json.loads(command_line("samples", job.name, "--output", "json"))}
    assert states & {"running", "admitted", "interrupted", "completed", "sealed", "trained"}
    assert 0 in {one["step"] for one in json.loads(command_line("eval", job.name, "--output", "json"))}
    command_line("timeline", job.name, "--trace", str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    training = [event["args"] for event in events if event["ph"] == "X" and event["name"] == "training"]
    told = [one["why"] for one in training if "epoch" in one]  # by a rung at its end, which a pod's last may not have
    assert len(told) >= max(2 * 3, len(training) - 2)
    assert {"NextStep"} == set(told)


# -------------------------------------------------------------------------------------------------------- a bad member
HUNG_UP = {"", "SSLError", "SSLEOFError", "SSLZeroReturnError", "ConnectionResetError", "BrokenPipeError"}
ASK_FOR_TARGETS = """
import socket, ssl, sys
keys, host, name = '/etc/colocate/tls/', *sys.argv[1:]
request = '''GET /v1/link HTTP/1.1
Host: agent
Authorization: Bearer ''' + open(keys + 'data-token').read().strip() + '''
Connection: Upgrade
Upgrade: websocket
Sec-WebSocket-Version: 13
Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==

'''
def ask(context):
    try:
        plain = socket.create_connection((host, 8443), timeout=60)
        with context.wrap_socket(plain, server_hostname=name) as link:
            link.sendall(request.replace(chr(10), chr(13) + chr(10)).encode())
            return link.recv(1000).decode().partition(chr(13))[0]
    except OSError as error:
        return type(error).__name__
context = ssl.create_default_context(cafile=keys + 'ca.crt')
print(ask(context))
context.load_cert_chain(keys + 'tls.crt', keys + 'tls.key')
print(ask(context))
"""


def test_the_data_token_and_a_members_own_keys_send_no_target(job: RunningJob) -> None:
    """A rollout controller that somebody else has taken over holds only these."""
    agent = job.pods(names.ROLE_GPU)[0]
    name = names.pod_server_name(names.JobUid(job.uid), agent["metadata"]["name"])
    arguments = (agent["status"]["podIP"], name)
    output = job.python(job.rollout_pod, names.ROLLOUT_CONTAINER, ASK_FOR_TARGETS, *arguments)
    without, with_own = output.splitlines()
    assert {without, with_own} <= HUNG_UP, "no certificate but the operator's gets an answer"


# ------------------------------------------------------------------------------------------------------- engine faults
def test_an_engine_killed_while_it_serves_comes_back_gated_and_climbs(job: RunningJob) -> None:
    pod = job.gpu_pods[0]
    lost = len(events_of(job, pod, "engine lost"))
    before = engine_of(job, pod)["incarnation"]
    assert job.signal(pod, names.GPU_CONTAINER, command_contains=ENGINE, signal="SIGKILL") > 0
    wait_for(
        "the loss of the engine to be seen",
        lambda: len(events_of(job, pod, "engine lost")) > lost,
        deadline_s=SEEN_S,
        explain=job.describe,
    )
    job.wait_for_step(job.step + 2, deadline_s=START_S)
    assert engine_of(job, pod)["incarnation"] not in (None, before)
    after = since_loss(job, pod)
    up, agrees = first(after, "engine started"), first(after, "probe passed")
    serves = first(after, "rung reached", rung=Rung.SERVING)
    assert after.index(up) < after.index(agrees) < after.index(serves)
    wait_for(
        "the rollout controller to see its gate open",
        lambda: any(line.ts > agrees.ts and line.fields["gate"] == pod for line in job.rollout_lines("gate open")),
        deadline_s=SEEN_S,
        explain=job.describe,
    )


def test_an_engine_killed_while_the_trainer_holds_the_gpu_is_absent_until_offloaded(job: RunningJob) -> None:
    victim, other = job.gpu_pods
    with trainer_held(job, other):
        assert job.signal(victim, names.GPU_CONTAINER, command_contains=ENGINE, signal="SIGKILL") > 0
        wait_for(
            "the engine to be absent",
            lambda: engine_of(job, victim)["state"] == "Absent",
            deadline_s=SEEN_S,
            explain=job.describe,
        )
        held_at = job.step
        wait_for(
            "the group to stay at Released",
            lambda: job.status["rung"] == Rung.RELEASED,
            deadline_s=SEEN_S,
            explain=job.describe,
        )
    job.wait_for_step(held_at + 2, deadline_s=START_S)
    after = since_loss(job, victim)
    started = first(after, "action ended", action="StartEngine").began
    assert started > reached(only(after, "rung reached"), victim, Rung.OFFLOADED) - 0.001
    step = held_at + 1
    joined = [line for line in only(after, "rung reached") if line.fields["step"] == step]
    assert reached(joined, victim, Rung.UPDATED) > started
    serving = [reached(list(job.rungs(step)), pod, Rung.SERVING) for pod in (victim, other)]
    assert min(serving) > reached(joined, victim, Rung.UPDATED), "a gate opened before every pod held the new weights"


def test_commands_of_runbooks_and_pages_look_at_the_job(job: RunningJob, terminal: RecordedTerminal) -> None:
    """The commands run as they stand, after an engine was lost: the first of them
    searches for the line that reports it.
    """
    job.wait_for_step(job.step + 1, deadline_s=STEPS_S)
    runbooks = [f"docs/runbooks/{page.name}" for page in sorted((CHECKOUT.root / "docs/runbooks").glob("*.md"))]
    looks = [
        command
        for page in runbooks
        for heading in ("What to look at", "A support archive")
        if any(block.is_command and block.heading == heading for block in blocks(page))
        for command in under(page, heading)
    ]
    looks += [command for command in under("docs/samples.md", "Look at samples") if "--follow" not in command]
    looks += under(ONE_GPU, "Watch it")
    assert len(looks) > 20
    for command in dict.fromkeys(looks):
        pod = job.rollout_pod if "-c rollout" in command else job.gpu_pods[0]
        terminal(command, JOB=job.name, POD=pod, sums=job.name, first=job.name)


def test_the_gateway_answers_as_the_page_for_one_gpu_asks_it(job: RunningJob, terminal: RecordedTerminal) -> None:
    port = free_port()
    forward, ask = under(ONE_GPU, "Ask it")
    forward = forward.replace("first-rollout-0", job.rollout_pod).replace(" 8080", f" {port}:8080")
    ask = ask.replace(":8080/", f":{port}/").replace('"first"', f'"{job.name}"')
    waits = "curl --silent --fail --retry 30 --retry-all-errors --retry-delay 1"
    answer = terminal(f"{forward} >&2 & trap 'kill $!' EXIT\n{ask.replace('curl', waits, 1)}")
    [choice] = json.loads(answer)["choices"]
    assert "assistant" == choice["message"]["role"]


def test_the_page_of_a_job_is_behind_the_port_that_kubectl_forwards(
    job: RunningJob, terminal: RecordedTerminal
) -> None:
    """The document itself, and every step so far behind what it reads its curve from.

    A step that is over has the times of the group's climb to it, and what its trainers measured.
    """
    job.wait_for_step(2, deadline_s=STEPS_S)
    port = free_port()
    [forward] = under("docs/samples.md", "In a browser")
    forward = forward.replace("sums-rollout-0", job.rollout_pod).replace(" 8080", f" {port}:8080")
    asks = f"curl --silent --fail --retry 30 --retry-all-errors --retry-delay 1 http://127.0.0.1:{port}"
    step = job.step
    answer = terminal(f"{forward} >&2 & trap 'kill $!' EXIT\n{asks}/v1/batches && {asks}/")
    batches, document = json.JSONDecoder().raw_decode(answer)
    steps = [batch["step"] for batch in batches["batches"]]
    assert [*range(1, len(steps) + 1)] == steps
    assert len(steps) >= step
    climbs = [batch["climb"] for batch in batches["batches"] if batch["climb"] and batch["climb"]["tookS"]]
    assert any("Trained" in climb["tookS"] and (climb["mismatch"] or 0) > 0 for climb in climbs), climbs
    assert answer[document:].startswith("<!doctype html>")


def test_a_pod_that_is_lost_takes_no_finished_step_with_it(job: RunningJob) -> None:
    """It is lost while the group trains. The step before is in no checkpoint, but in the memory of both pods."""
    before, (survivor, lost) = job.status, job.gpu_pods

    def lost_behind_a_step_in_memory() -> int | None:
        with trainer_held(job, survivor):
            rank = job.member(survivor)["facts"]["trainers"][0]
            if rank["mirrored"] != rank["step"]:
                return None  # it has a checkpoint
            job.kubectl("delete", "pod", lost, "--force", "--grace-period=0", "--wait=false")
            return int(rank["step"])

    kept = wait_for("a pod to be lost", lost_behind_a_step_in_memory, deadline_s=STEPS_S, explain=job.describe)
    job.wait_for_step(kept + 2, deadline_s=START_S)
    after = job.status
    assert lost not in job.gpu_pods
    assert (before["lineage"] + 1, before["restarts"]) == (after["lineage"], after["restarts"])
    trained = [
        line.fields["step"] for line in job.agent_lines("step trained") if line.fields["lineage"] == after["lineage"]
    ]
    assert kept + 1 == min(trained), "the step that was under way is the first of the new trainers"


# ----------------------------------------------------------------------------------------------------- operator faults
def test_an_operator_killed_in_the_middle_of_a_switch_is_taken_over(job: RunningJob, kubectl: KubectlCall) -> None:
    with trainer_held(job, job.gpu_pods[1]):
        before = job.status
        selector = "app.kubernetes.io/component=operator"
        kubectl(
            *("-n", OPERATOR_NAMESPACE, "delete", "pods", "-l", selector),
            *("--force", "--grace-period=0", "--wait=false"),
        )
        after = wait_for(
            "another operator to raise the epoch",
            lambda: status if (status := job.status)["epoch"] > before["epoch"] else None,
            deadline_s=START_S,
            explain=job.describe,
        )
    assert (before["targetStep"], before["lineage"]) == (after["targetStep"], after["lineage"])
    job.wait_for_step(before["targetStep"] + 1, deadline_s=STEPS_S)
    trained = [line for line in job.agent_lines("step trained") if line.fields["step"] == before["targetStep"]]
    assert len(trained) == 2, "each rank trains the step once, whoever operates"
    assert job.status["lineage"] == before["lineage"]


# ------------------------------------------------------------------------------------------------ other numbers of pods
def test_a_job_that_runs_goes_on_in_fewer_pods_with_the_samples_that_it_had(
    job: RunningJob, terminal: RecordedTerminal
) -> None:
    """The commands of the runbook ask for it. The step before is saved for it, and no step is trained twice."""
    before, admitted = job.status, read_accounts(job)["admitted_ever"]
    change_replicas, wait, *_ = under("docs/runbooks/operations.md", "More or fewer GPUs")
    terminal(change_replicas, JOB=job.name)
    terminal(wait, JOB=job.name)
    began = job.status["targetStep"]
    job.wait_for_step(began + 1, deadline_s=START_S)
    assert ["two-gpu-0"] == [pod.rpartition("-")[0] for pod in job.gpu_pods]
    after = job.status
    assert (before["lineage"] + 1, before["restarts"]) == (after["lineage"], after["restarts"])
    trained = [line.fields["step"] for line in job.agent_lines("step trained")]
    since = [step for step in trained if step >= before["targetStep"]]
    assert sorted(set(since)) == sorted(since), "no step twice"
    assert {began, began + 1} <= set(since)
    assert_nothing_is_lost(job, admitted)


def test_a_suspended_job_has_no_pods_and_goes_on_in_more_with_the_samples_that_it_had(
    job: RunningJob, terminal: RecordedTerminal
) -> None:
    """The commands of the runbook suspend and resume it."""
    before, admitted = job.status, read_accounts(job)["admitted_ever"]
    *_, suspend, change_replicas, resume = under("docs/runbooks/operations.md", "More or fewer GPUs")
    terminal(suspend, JOB=job.name)
    assert [] == [pod["metadata"]["name"] for pod in job.pods(*ROLES)]
    step = job.step
    terminal(change_replicas, JOB=job.name)
    terminal(resume, JOB=job.name)
    job.wait_for_step(step + 2, deadline_s=START_S)
    assert ["two-gpu-0", "two-gpu-1"] == [pod.rpartition("-")[0] for pod in job.gpu_pods]
    after = job.status
    assert (before["lineage"] + 1, before["restarts"]) == (after["lineage"], after["restarts"])
    assert_nothing_is_lost(job, admitted)


def assert_nothing_is_lost(job: RunningJob, admitted: int) -> None:
    """Every sample has a state, and samples that were under way went on. admitted: those before."""
    accounts = read_accounts(job)
    assert accounts["admitted_ever"] > admitted
    assert accounts["admitted_ever"] == sum(accounts["by_state"].values()) + accounts["retired"]
    assert resumed_samples(job) > 0, "no token was kept"


# -------------------------------------------------------------------------------------------------------------- ending
def test_the_job_completes_after_its_last_step_and_frees_its_pods(job: RunningJob) -> None:
    """Its last step is that of the spec, or the one that it is at when the operator sees that fewer are enough."""
    job.end_soon()
    changed = job.get()
    seen = wait_for(
        "the operator to see it",
        lambda: status if (status := job.status)["observedGeneration"] == changed["metadata"]["generation"] else None,
        deadline_s=SEEN_S,
        explain=job.describe,
    )
    job.wait_for_condition("Complete", deadline_s=STEPS_S)
    assert job.condition("Ready") == "True"
    assert job.step == max(changed["spec"]["steps"], seen["targetStep"])
    wait_for(
        "all pods to have succeeded",
        lambda: {"Succeeded"} == {pod["status"]["phase"] for pod in job.pods(*ROLES)},
        deadline_s=SUCCEEDED_S,
        explain=job.describe,
    )


def test_deletion_leaves_nothing_but_retained_volumes(job: RunningJob) -> None:
    """Every member has ended by now."""
    assert_deleted(job)


def test_deletion_does_not_wait_for_members_that_are_dead(kubectl: KubectlCall) -> None:
    job = apply(kubectl, "one-pod.yaml")
    wait_for(
        "pods to run",
        lambda: {"Running"} == {pod["status"]["phase"] for pod in job.pods(*ROLES)},
        deadline_s=START_S,
        explain=job.describe,
    )
    job.kubectl("delete", "pods", "--all", "--force", "--grace-period=0", "--wait=false")
    assert_deleted(job)


ROLES = (names.ROLE_GPU, names.ROLE_ROLLOUT)


# ------------------------------------------------------------------------------------------------------------- reading
def assert_climbed_in_order(job: RunningJob, step: int) -> None:
    """Each pod reached the rungs in order, and none began what lies beyond a barrier before all stood there."""
    pods, lines = job.gpu_pods, list(job.rungs(step))
    for pod in pods:
        rungs = [Rung(line.fields["rung"]) for line in lines if line.pod == pod]
        assert sorted(rungs, key=TIME_SLICED.place) == rungs, f"{pod} in step {step}"
        assert {Rung.RELEASED, Rung.TRAINED, Rung.EXPORTED, Rung.SERVING} <= set(rungs), f"{pod} in step {step}"
    actions = [line for line in job.agent_lines("action ended") if line.fields.get("step") == step]
    for barrier, beyond in BEYOND.items():
        all_there = max(reached(lines, pod, barrier) for pod in pods)
        for action in beyond:
            began = [line.began for line in actions if line.fields["action"] == action]
            assert began, f"no {action} in step {step}"
            assert min(began) >= all_there - CLOCK_S, f"{action} before every pod was {barrier}, step {step}"
    updated = max(reached(lines, pod, Rung.UPDATED) for pod in pods)
    assert min(reached(lines, pod, Rung.SERVING) for pod in pods) >= updated, "no gate opens before all are updated"
    assert set(BEYOND) < TIME_SLICED.barriers < set(TIME_SLICED.rungs)


CLOCK_S = 0.002  # log lines are written just after what they tell
TURN_S = 0.05  # of another process on the core, between the end of what a line tells and its moment: it begins as late


def events_of(job: RunningJob, pod: str, event: str) -> list[Line]:
    return only(job.lines(pod, names.AGENT_CONTAINER), event)


def only(lines: list[Line], event: str, **fields: Any) -> list[Line]:
    return [line for line in lines if line.event == event and fields.items() <= line.fields.items()]


def first(lines: list[Line], event: str, **fields: Any) -> Line:
    found = only(lines, event, **fields)
    assert found, f"no line {event!r} {fields}; there are {sorted({line.event for line in lines})}"
    return found[0]


def since_loss(job: RunningJob, pod: str) -> list[Line]:
    """Return what the pod's agent has logged since it last lost its engine, in order."""
    lines = job.lines(pod, names.AGENT_CONTAINER)
    first(lines, "engine lost")
    return lines[lines.index(only(lines, "engine lost")[-1]) + 1 :]


PROCESSES = """
import json, pathlib
found = {}
for path in pathlib.Path('/proc').glob('[0-9]*'):
    try:
        command = (path / 'cmdline').read_bytes().decode(errors='replace')
        began = int((path / 'stat').read_text().rpartition(')')[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        continue
    kind = 'first' if path.name == '1' else next((kind for kind, part in KINDS.items() if part in command), None)
    found.setdefault(kind, []).append((int(path.name), began))
print(json.dumps({kind: sorted(found.get(kind, [])) for kind in ('first', *KINDS)}))
"""


def processes_of(job: RunningJob) -> dict[str, dict[str, list[list[int]]]]:
    """Return, for each container of the job, ids and start times of its first process, its engine and its ranks."""
    places = [(pod, container) for pod in job.gpu_pods for container in (names.GPU_CONTAINER, names.AGENT_CONTAINER)]
    places.append((job.rollout_pod, names.ROLLOUT_CONTAINER))
    code = f"KINDS = {json.dumps({'engine': ENGINE, 'trainer': TRAINER})}{PROCESSES}"
    return {f"{pod}/{container}": json.loads(job.python(pod, container, code)) for pod, container in places}


def resumed_samples(job: RunningJob) -> int:
    """Return the number of resumed samples in all batches that the rollout controller has sealed."""
    return sum(line.fields["resumed_samples"] for line in job.rollout_lines("batch sealed"))


def engine_of(job: RunningJob, pod: str) -> dict[str, Any]:
    engine: dict[str, Any] = job.member(pod)["facts"]["engines"][0]
    return engine


READ_BATCHES = """
import json, pathlib
import numpy as np
from safetensors.numpy import load_file
out = dict.fromkeys(('batches', 'policy_tokens', 'with_version', 'with_logp', 'spanning', 'spanning_in_order'), 0)
out |= dict(max_staleness=0, min_staleness=0)
for path in pathlib.Path('/var/lib/colocate/batches').glob('*.safetensors'):
    try:
        step, batch = int(path.name.split('-')[0]), load_file(path)
    except FileNotFoundError:  # a checkpoint became durable, and holds its steps
        continue
    out['batches'] += 1
    mask, made_at, logp = batch['loss_mask'] == 1, batch['token_step'], batch['behaviour_logp']
    staleness = step - 1 - made_at[mask]
    out['policy_tokens'] += int(mask.sum())
    out['with_version'] += int((made_at[mask] >= 0).sum())
    out['with_logp'] += int((np.isfinite(logp[mask]) & (logp[mask] <= 0)).sum())
    out['max_staleness'] = max(out['max_staleness'], int(staleness.max()))
    out['min_staleness'] = min(out['min_staleness'], int(staleness.min()))
    start = 0
    for end in batch['sample_end']:
        steps = made_at[start:end][mask[start:end]]
        if len(set(steps.tolist())) > 1:
            out['spanning'] += 1
            out['spanning_in_order'] += int((np.diff(steps) >= 0).all())
        start = end
print(json.dumps(out))
"""

READ_ACCOUNTS = """
import json, sqlite3
db = sqlite3.connect('file:/var/lib/colocate/store.sqlite3?mode=ro', uri=True, timeout=60)
db.execute('BEGIN')
one = lambda sql: db.execute(sql).fetchone()[0] or 0
print(json.dumps(dict(
    by_state=dict(db.execute('SELECT state, count(*) FROM samples GROUP BY state').fetchall()),
    retired=one('SELECT sum(count) FROM retired'),
    admitted_ever=one('SELECT max(id) FROM samples'),
    samples_of_no_group=one('SELECT count(*) FROM samples WHERE group_id NOT IN (SELECT id FROM groups)'),
)))
"""


def read_batches(job: RunningJob) -> dict[str, Any]:
    """Figures over every sealed batch that is kept for replay."""
    figures: dict[str, Any] = json.loads(job.python(job.rollout_pod, names.ROLLOUT_CONTAINER, READ_BATCHES))
    return figures


def read_accounts(job: RunningJob) -> dict[str, Any]:
    accounts: dict[str, Any] = json.loads(job.python(job.rollout_pod, names.ROLLOUT_CONTAINER, READ_ACCOUNTS))
    return accounts


# -------------------------------------------------------------------------------------------------------------- faults
SLOW_DOWN = """
import os, pathlib, signal, sys, time
def engine():
    for path in pathlib.Path('/proc').glob('[0-9]*'):
        try:
            if int(path.name) not in (1, os.getpid()) and sys.argv[1].encode() in (path / 'cmdline').read_bytes():
                yield int(path.name)
        except (FileNotFoundError, ProcessLookupError):
            pass
def send(number):
    for pid in engine():
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass
slowed = pathlib.Path(sys.argv[2])
slowed.touch()
until = time.monotonic() + float(sys.argv[3])
try:
    while slowed.exists() and time.monotonic() < until:
        send(signal.SIGSTOP); time.sleep(0.15)
        send(signal.SIGCONT); time.sleep(0.05)
finally:
    send(signal.SIGCONT)
    slowed.unlink(missing_ok=True)
"""
SLOWED = "/tmp/slowed"  # there while the engine is
SLOWED_S = 90  # at most: a command has less than two minutes


@contextmanager
def slowed(job: RunningJob, pod: str) -> Iterator[None]:
    """The pod's engine runs a quarter of the time."""

    def run(code: str, *args: str) -> str:
        return job.python(pod, names.GPU_CONTAINER, f"import pathlib, sys\n{code}", *args).strip()

    with ThreadPoolExecutor(1) as pool:
        slowing = pool.submit(run, SLOW_DOWN, ENGINE, SLOWED, str(SLOWED_S))
        try:
            is_slowed = "print(pathlib.Path(sys.argv[1]).exists())"
            wait_for("the engine to be slowed", lambda: "True" == run(is_slowed, SLOWED), deadline_s=SEEN_S)
            yield
        finally:
            run("pathlib.Path(sys.argv[1]).unlink(missing_ok=True)", SLOWED)
        slowing.result()


def stopped_off_device(job: RunningJob, pod: str) -> bool:
    """Stop the trainer, and return whether it was off the device. In an export or a
    save it would block the group's training.
    """
    assert job.signal(pod, names.GPU_CONTAINER, command_contains=TRAINER, signal="SIGSTOP") > 0
    trainer = job.member(pod)["facts"]["trainers"][0]
    if trainer["state"] == "Offloaded" and trainer["step"] in (trainer["saved"], trainer["mirrored"]):
        return True
    job.signal(pod, names.GPU_CONTAINER, command_contains=TRAINER, signal="SIGCONT")
    return False


@contextmanager
def trainer_held(job: RunningJob, pod: str) -> Iterator[None]:
    """One pod's trainer stands still, so the group stays at Released with a trainer on the devices."""
    wait_for("its trainer to be stopped before its turn", lambda: stopped_off_device(job, pod), deadline_s=STEPS_S)
    try:
        other = next(name for name in job.gpu_pods if name != pod)
        wait_for(
            "a trainer to hold the GPU",
            lambda: job.member(other)["facts"]["trainers"][0]["state"] == "Training",
            deadline_s=STEPS_S,
            explain=job.describe,
        )
        wait_for("the status to say so", lambda: job.status["rung"] == Rung.RELEASED, deadline_s=STEPS_S)
        yield
    finally:
        job.signal(pod, names.GPU_CONTAINER, command_contains=TRAINER, signal="SIGCONT")


def assert_deleted(job: RunningJob) -> None:
    """Nothing of the job is left after the deadline but the claims that it retains."""
    uid = job.uid
    job.kubectl("delete", names.PLURAL, job.name, "--wait=false")
    wait_for("the job to be gone", lambda: not objects(job, names.PLURAL), deadline_s=DELETED_S, explain=job.describe)
    rest = ("pods", "secrets", "configmaps", "networkpolicies", "poddisruptionbudgets")
    wait_for(
        "its objects to be gone",
        lambda: not [one for kind in rest for one in objects(job, kind, uid)],
        deadline_s=DELETED_S,
        explain=lambda: str([one for kind in rest for one in objects(job, kind, uid)]),
    )
    assert len(objects(job, "persistentvolumeclaims", uid)) == 2, "store and checkpoints are retained"


def objects(job: RunningJob, kind: str, uid: str | None = None) -> list[str]:
    """Names of what is there, of one job if it is named."""
    selector = ["-l", f"{names.JOB_UID_LABEL}={uid}"] if uid else ["--field-selector", f"metadata.name={job.name}"]
    items = json.loads(job.kubectl("get", kind, *selector, "-o", "json"))["items"]
    return [str(item["metadata"]["name"]) for item in items]
