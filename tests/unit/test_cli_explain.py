"""`explain`: why a job does not move, from status, pods and the members' own pages."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from builders import MIXED_ROLLOUT, RESIDENT_ROLLOUT, absent_engine, absent_trainer, make_manifest, pod_facts
from colocated_rl_api import names
from colocated_rl_api.job import Rollout
from colocated_rl_api.rungs import Rung
from colocated_rl_cli.base.errors import NotAllowed
from colocated_rl_cli.commands import explanation_text
from colocated_rl_cli.evidence.evidence import Evidence
from colocated_rl_cli.explain.explanation import Explanation, explain
from colocated_rl_cli.explain.remedies import REMEDIES
from colocated_rl_cli.explain.waiting import MOVERS
from colocated_rl_operator.planner.reasons import Cause, Reason
from setup.layout import CHECKOUT

NOW = datetime(2026, 1, 1, 1, tzinfo=UTC)
Body = dict[str, Any]


def job(*, status: Body | None = None, generation: int = 1, **spec: Any) -> Body:
    manifest = make_manifest(**spec)
    return {
        **manifest,
        "metadata": {**manifest["metadata"], "uid": "u", "generation": generation, "creationTimestamp": "2026-01-01"},
        "status": status or {},
    }


def condition(kind: str, value: str, reason: str, message: str = "") -> Body:
    return {
        "type": kind, "status": value, "reason": reason, "message": message,
        "lastTransitionTime": "2026-01-01T00:00:00Z", "observedGeneration": 1,
    }  # fmt: skip


def running(**more: Any) -> Body:
    """A status in the middle of a job."""
    return {
        "observedGeneration": 1, "phase": "Rollout", "step": 1, "epoch": 4, "lineage": 1, "targetStep": 1,
        "cause": "NextStep", "rung": "Serving", "replicas": 2, "readyReplicas": 2,
        "conditions": [condition("Ready", "True", "Serving")],
        **more,
    }  # fmt: skip


def pod(seat: str, **status: Any) -> Body:
    role, _, replica = seat.partition("-")
    labels = {names.ROLE_LABEL: role, names.ATTEMPT_LABEL: "0", **({names.REPLICA_LABEL: replica} if replica else {})}
    return {
        "metadata": {"name": f"sums-{seat}-0", "labels": labels},
        "status": {"phase": "Running", "containerStatuses": [{"name": "c", "state": {"running": {}}}], **status},
    }


PODS = [pod("gpu-0"), pod("gpu-1"), pod("rollout")]


def gpu_page(*, open_gate: bool = True, target: str = "1-1", problem: Body | None = None, **more: Any) -> Body:
    engine = {"name": "engine-0", "state": "Ready", "incarnation": "i", "version": "1-1"}
    trainer = {"rank": 0, "state": "Offloaded", "lineage": 1, "step": 1, "exported": "1-1"}
    facts = {
        "type": "podFacts", "epoch": 4, "gate": {"open": open_gate, "settled": not open_gate},
        "engines": [engine], "trainers": [trainer], "problem": problem, **more,
    }  # fmt: skip
    step, _, lineage = target.partition("-")
    target_of = {"epoch": facts["epoch"], "goal": "Climb", "step": step, "lineage": lineage, "rung": "Serving"}
    return {"facts": facts, "hello": {}, "target": target_of}


def rollout_page(**more: Any) -> Body:
    facts = {"type": "rolloutFacts", "epoch": 4, "gatesOpen": 2, "tokensPerSecond": 900.0, **more}
    return {"facts": facts, "hello": {}, "target": None}


SEALED: Body = {"step": 2, "groups": 4, "samples": 8, "lossTokens": 10}


def pages(**more: Any) -> Body:
    return {"sums-gpu-0-0": gpu_page(), "sums-gpu-1-0": gpu_page(), "sums-rollout-0": rollout_page()} | more


def explained(
    one: Body, pods: list[Body] | None = None, states: Mapping[str, Any] | None = None, **more: Any
) -> Explanation:
    seen = pages() if states is None else states
    return explain(Evidence(one, PODS if pods is None else pods, more.pop("events", []), seen, NOW, **more))


@pytest.mark.parametrize("page", [[], None, 7, {"facts": None}, {"facts": [], "target": {}}, {"facts": {"type": []}}])
def test_a_page_of_another_form_is_passed_over(page: Any) -> None:
    """Whoever is in a pod may serve one in the place of the member's: it was a traceback."""
    states = {"sums-gpu-0-0": page, "sums-gpu-1-0": gpu_page(), "sums-rollout-0": rollout_page()}
    assert {"sums-gpu-1-0": "Serving"} == explained(job(status=running()), states=states).rungs


def reasons(found: Explanation) -> list[tuple[str, str | None]]:
    return [(cause.reason, cause.pod) for cause in found.causes]


# ----------------------------------------------------------------------------------------------------- nothing is wrong
def test_a_job_in_rollout_waits_for_its_batch() -> None:
    states = pages(**{"sums-rollout-0": rollout_page(samples={"completed": 3, "running": 5, "interrupted": 1})})
    found = explained(job(status=running()), states=states)
    assert not found.is_problem
    assert "rollout fills batch 2: 3 of 8 samples finished, 6 under way, 900 tokens/s" == found.waits_for
    assert {"sums-gpu-0-0": "Serving", "sums-gpu-1-0": "Serving"} == found.rungs


APART: Body = {"reference": {"placement": "OwnDevices", "replicas": 1}}
READY = {"conditions": [{"type": "Ready", "status": "True"}]}


def test_a_job_whose_reference_is_slow_says_how_many_samples_wait_for_it() -> None:
    """It does not say that engines have nothing to do."""
    busy = rollout_page(samples={"completed": 7}, unscored=5, tokensPerSecond=0.0)
    found = explained(
        job(status=running(), **APART), [*PODS, pod("reference-0", **READY)], pages(**{"sums-rollout-0": busy})
    )
    assert not found.is_problem
    words = "7 of 8 samples finished, 5 of them wait for the reference, 0 under way"
    assert f"rollout fills batch 2: {words}" == found.waits_for
    assert () == found.notes, "a reference has no page to read"


def test_a_reference_that_is_missing_or_loads_its_model_is_named() -> None:
    one = job(status=running(), **APART)
    assert [("NoPod", None)] == reasons(explained(one))
    assert [("PodStarting", "sums-reference-0-0")] == reasons(explained(one, [*PODS, pod("reference-0")]))
    problem = {"reason": "ReferenceUnavailable", "message": "none of its pods is there"}
    waits = pages(**{"sums-rollout-0": rollout_page(problem=problem, unscored=3)})
    found = explained(one, [*PODS, pod("reference-0", **READY)], waits)
    assert [("ReferenceUnavailable", "sums-rollout-0")] == reasons(found)
    assert [] == reasons(explained(job(status=running(), reference={}))), "with the trainers there are no such pods"


def test_a_sealed_batch_waits_for_the_evaluation_that_is_due() -> None:
    states = pages(**{"sums-rollout-0": rollout_page(sealed=SEALED)})
    evaluated = explained(job(status=running(), evaluation={"everySteps": 1, "deadlineSeconds": 60}), states=states)
    waits = "batch 2 is sealed; the evaluation of step 1 has to end first: held-out (at most 60 s"
    assert waits in str(evaluated.waits_for)
    assert "batch 2 is sealed: the switch begins" == explained(job(status=running()), states=states).waits_for


def test_a_pod_that_lags_is_named_with_its_rung_how_long_and_the_deadline() -> None:
    status = running(phase="Switching", targetStep=2, rung="Paused")
    closed = gpu_page(open_gate=False, target="2-1")
    closed["facts"]["engines"][0]["paused"] = True
    drained = gpu_page(open_gate=False, target="2-1")
    drained["facts"]["engines"][0] |= {"paused": True, "drained": True}
    states = pages(**{"sums-gpu-0-0": closed, "sums-gpu-1-0": drained})
    found = explained(job(status=status), states=states, since={"sums-gpu-0-0": NOW.timestamp() - 12})
    assert {"sums-gpu-0-0": "Paused", "sums-gpu-1-0": "Drained"} == found.rungs
    assert (
        "sums-gpu-0-0 at Paused, for 12 s now: the engine's scheduler reports that it is idle (at most 60 s: "
        "switch.engineCallSeconds)"
    ) == found.waits_for


def test_of_a_mixed_job_pods_are_named_by_what_they_have_still_to_do() -> None:
    """The seats are those of both kinds, and an engine with devices of its own has no part in training."""
    apart = gpu_page(target="2-1", trainers=[], export="1-1")
    rank = {"rank": 0, "state": "Training", "lineage": 1, "step": 1}
    gone = {"weights": "Released", "kvCache": "Released", "cudaGraph": "Released"}
    engine = {"name": "engine-0", "state": "Ready", "incarnation": "i", "paused": True, "drained": True, **gone}
    beside = gpu_page(target="2-1", trainers=[rank], engines=[engine], open_gate=False)
    states = {"sums-gpu-0-0": beside, "sums-engine-0-0": apart, "sums-rollout-0": rollout_page()}
    status = running(phase="Training", targetStep=2, rung="Released", placement="Mixed")
    body = job(status=status, replicas=1, rollout=MIXED_ROLLOUT)
    found = explained(body, [pod("gpu-0"), pod("engine-0"), pod("rollout")], states=states)
    assert {"sums-gpu-0-0": "Released", "sums-engine-0-0": "Exported"} == found.rungs
    assert "sums-gpu-0-0 at Released: the trainer, which has the GPU, makes the step" in str(found.waits_for)
    missing = explained(body, [pod("gpu-0"), pod("rollout")], states=states)
    assert any("engine-0" in str(cause) for cause in missing.causes)


def test_a_resident_pod_waits_for_its_own_ladder() -> None:
    """Below Exported nothing is about to close, and nobody leaves a device."""
    training = gpu_page(target="2-1", trainers=[{"rank": 0, "state": "Training", "lineage": 1, "step": 1}])
    states = pages(**{f"sums-gpu-{replica}-0": training for replica in (0, 1)})
    status = running(phase="Training", targetStep=2, rung="Sealed")
    found = explained(job(status=status, rollout=RESIDENT_ROLLOUT), states=states)
    assert {"sums-gpu-0-0": "Sealed", "sums-gpu-1-0": "Sealed"} == found.rungs
    assert "the trainer makes the step beside rollout" in str(found.waits_for)
    assert "switch.trainerProgressSeconds" in str(found.waits_for)


@pytest.mark.parametrize(
    ("scored", "rung", "words"),
    [
        (1, "Sealed", "the reference scores the batch (after a start: the trainer loads its checkpoint)"),
        (2, "Scored", "the trainer, which has scores of the batch, makes the step"),
    ],
)
def test_a_job_with_a_reference_waits_for_its_scores_and_then_for_the_step(scored: int, rung: str, words: str) -> None:
    rank = {"rank": 0, "state": "Scoring", "lineage": 1, "step": 1, "scored": scored}
    states = pages(**{f"sums-gpu-{replica}-0": gpu_page(target="2-1", trainers=[rank]) for replica in (0, 1)})
    status = running(phase="Training", targetStep=2, rung=rung, placement="Resident")
    found = explained(job(status=status, rollout=RESIDENT_ROLLOUT, reference={}), states=states)
    assert {"sums-gpu-0-0": rung, "sums-gpu-1-0": rung} == found.rungs
    assert f"at {rung}: {words} (at most 900 s to start, 1800 s without progress" in str(found.waits_for)


def test_a_sealed_batch_of_a_resident_job_waits_for_no_evaluation() -> None:
    states = pages(**{"sums-rollout-0": rollout_page(sealed=SEALED)})
    one = job(status=running(), evaluation={"everySteps": 1}, rollout=RESIDENT_ROLLOUT)
    assert "batch 2 is sealed: the step begins" == explained(one, states=states).waits_for


def test_a_suspended_job_is_explained_with_how_to_resume_it() -> None:
    conditions = [condition("Suspended", "True", "Suspended", "its pods are gone")]
    found = explained(job(status=running(phase="Suspended", conditions=conditions), suspend=True), pods=[], states={})
    assert [("Suspended", None)] == reasons(found)
    assert "kubectl crlj resume" in explanation_text(found)
    suspending = explained(job(status=running(phase="Suspending"), suspend=True))
    assert ([("Suspending", None)], False) == (reasons(suspending), suspending.is_problem)


def test_a_job_of_another_controller_is_left_alone() -> None:
    assert [("ManagedByAnother", None)] == reasons(explained(job(managedBy="a.com/b"), pods=[], states={}))


def test_a_job_that_is_over_has_nothing_to_explain() -> None:
    over = [condition("Complete", "True", "Completed"), condition("Ready", "True", "Completed")]
    found = explained(job(status=running(phase="Complete", conditions=over)), pods=[])
    assert ([], None, False) == (list(found.causes), found.waits_for, found.is_problem)


def test_a_job_that_fails_is_explained_by_its_failure_and_not_by_the_pods_that_it_ends() -> None:
    failing = [condition("Failed", "False", "FailurePolicy"), condition("Stalled", "True", "FailurePolicy", "a rule")]
    found = explained(job(status=running(phase="Failed", conditions=failing)), pods=[], states={})
    assert ([("FailurePolicy", None)], None) == (reasons(found), found.waits_for)


# ------------------------------------------------------------------------------------------------------- the job itself
def test_a_job_that_no_operator_has_seen() -> None:
    assert [("NotSeen", None)] == reasons(explained(job(), pods=[], states={}))
    assert [("NotSeen", None)] == reasons(explained(job(status={"observedGeneration": -1}), pods=[], states={}))


def test_a_status_in_words_of_a_newer_operator_is_read_as_far_as_it_can_be() -> None:
    found = explained(job(status=running(phase="Thinking")))
    assert ("status.phase is known only to a newer kubectl crlj",) == found.notes
    assert "step 1 of 3" in found.headline


def test_a_spec_that_the_operator_has_not_read_yet() -> None:
    found = explained(job(status=running(), generation=2))
    assert ([("SpecNotSeen", None)], False) == (reasons(found), found.is_problem)


@pytest.mark.parametrize(
    "reason", ["InvalidSpec", "ObjectRefused", "VolumeLost", "BackoffLimitExceeded", "FailurePolicy"]
)
def test_a_stalled_job_is_a_problem_with_the_operators_words(reason: str) -> None:
    found = explained(job(status=running(conditions=[condition("Stalled", "True", reason, "the words")])))
    assert (reason, "the words", True) == (found.causes[0].reason, found.causes[0].message, found.is_problem)
    assert found.causes[0].remedy.do in explanation_text(found)


def test_a_failed_job_that_can_not_be_deleted_has_failed_all_the_same() -> None:
    failed = condition("Failed", "True", "BackoffLimitExceeded", "a trainer died")
    for stalled, expected in {
        "BackoffLimitExceeded": [("BackoffLimitExceeded", None)],
        "ObjectRefused": [("ObjectRefused", None), ("BackoffLimitExceeded", None)],
    }.items():
        found = explained(job(status=running(conditions=[condition("Stalled", "True", stalled, "words"), failed])))
        assert expected == reasons(found)


def test_a_job_that_does_not_end_after_its_deletion() -> None:
    deleted = job(status=running())
    deleted["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert ("Deleted", None) in reasons(explained(deleted))
    assert [("Deleted", None)] == reasons(explained(deleted, [], {})), "nobody makes pods for it any more"


def test_a_job_whose_operator_reaches_no_pod_is_a_problem_although_its_pods_serve() -> None:
    cut_off = condition("PodsReady", "False", Reason.OPERATOR_CUT_OFF, "no member is heard")
    found = explained(job(status=running(conditions=[cut_off])))
    assert ([("OperatorCutOff", None)], True, None) == (reasons(found), found.is_problem, found.waits_for)


# ----------------------------------------------------------------------------------------------------------------- pods
def waiting(reason: str, message: str = "") -> Body:
    return {
        "phase": "Pending",
        "containerStatuses": [{"name": "gpu", "state": {"waiting": {"reason": reason, "message": message}}}],
    }


def crashed(reason: str = "Error", message: str = "CUDA error") -> Body:
    ended = {"terminated": {"exitCode": 1, "reason": reason, "message": message}}
    state = {"waiting": {"reason": "CrashLoopBackOff"}}
    return {"containerStatuses": [{"name": "gpu", "restartCount": 3, "state": state, "lastState": ended}]}


def unscheduled(reason: str, message: str) -> Body:
    condition = {"type": "PodScheduled", "status": "False", "reason": reason, "message": message}
    return {"phase": "Pending", "conditions": [condition]}


@pytest.mark.parametrize(
    ("status", "reason", "message"),
    [
        (unscheduled("Unschedulable", "1 Insufficient nvidia.com/gpu"), "Unschedulable", "Insufficient nvidia.com/gpu"),
        (unscheduled("SchedulingGated", "Scheduling is blocked"), "SchedulingGated", "Scheduling is blocked"),
        (
            waiting("ImagePullBackOff", "no such image"),
            "ImageNotPulled",
            "container gpu: ImagePullBackOff: no such image",
        ),
        (crashed(), "ContainerCrashes", "CUDA error"),
        (crashed("OOMKilled"), "OutOfMemory", "container gpu, 3 restarts"),
        ({"phase": "Failed", "reason": "Evicted", "message": "node was low on memory"}, "Evicted", "low on memory"),
        (waiting("ContainerCreating"), "PodStarting", "Pending"),
    ],
)
def test_a_pod_that_does_not_run_is_named_with_its_cause(status: Body, reason: str, message: str) -> None:
    found = explained(job(status=running(rung="Unknown")), [pod("gpu-0", **status), *PODS[1:]], {})
    [cause] = [cause for cause in found.causes if cause.pod == "sums-gpu-0-0"]
    assert reason == cause.reason
    assert message in cause.message


def test_a_volume_that_is_not_there_is_found_in_the_pods_events() -> None:
    event = {"involvedObject": {"name": "sums-gpu-0-0"}, "reason": "FailedMount", "message": "claim model not found"}
    found = explained(
        job(status=running(rung="Unknown")),
        [pod("gpu-0", **waiting("ContainerCreating")), *PODS[1:]],
        {},
        events=[event],
    )
    assert ("VolumeNotMounted", "sums-gpu-0-0") in reasons(found)


def test_a_job_that_waits_in_a_queue_is_no_problem() -> None:
    gated = unscheduled("SchedulingGated", "Scheduling is blocked due to non-empty scheduling gates")
    found = explained(
        job(status=running(rung="Unknown")), [pod(seat, **gated) for seat in ("gpu-0", "gpu-1", "rollout")], {}
    )
    assert ({"SchedulingGated"}, False) == ({reason for reason, _ in reasons(found)}, found.is_problem)


def test_newest_warnings_are_of_the_job_and_its_pods_by_their_time() -> None:
    """Events are read of one object after the other."""
    times = {"job": "00:59:00", "pod": "00:01:00"}
    events = [
        {
            "involvedObject": {"name": name}, "type": "Warning", "reason": f"{name}-{count}",
            "lastTimestamp": f"2026-01-01T{time[:-1]}{count}Z",
        }
        for name, time in times.items() for count in range(4)
    ]  # fmt: skip
    found = explained(job(status=running()), events=events)
    expected = ["pod-3", "job-0", "job-1", "job-2", "job-3"]
    assert expected == [words.split(": ")[1] for words in found.warnings]


def test_a_seat_without_a_pod_is_reported() -> None:
    assert [("NoPod", None)] == reasons(explained(job(status=running()), pods=PODS[1:]))


def test_a_group_that_has_fewer_replicas_than_the_job_asks_for_misses_none_of_them() -> None:
    found = explained(job(status=running(groupReplicas=1)), pods=[PODS[0], *PODS[2:]])
    assert [("Resized", None)] == reasons(found)
    assert "the group has 1 replicas, 2 are asked for" == found.causes[0].message
    assert [] == reasons(explained(job(status=running(groupReplicas=2))))


def test_a_spare_holds_room_and_stands_on_no_rung() -> None:
    facts = pod_facts(absent_engine(), absent_trainer(), epoch=0).model_dump(mode="json", by_alias=True)
    states = pages(**{"sums-gpu-1024-0": {"facts": facts, "hello": {}, "target": None}})
    for status in (running(), running(rung="Unknown")):
        found = explained(job(status=status), [*PODS, pod("gpu-1024")], states)
        assert [] == reasons(found)
        assert "a spare, which holds room for the group" == found.rungs["sums-gpu-1024-0"]
    unschedulable = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}
    waits = pod("gpu-1024", phase="Pending", conditions=[unschedulable], containerStatuses=[])
    found = explained(job(status=running()), [*PODS, waits])
    assert ([], False) == (reasons(found), found.is_problem), "the group does without it"
    assert "a spare: Unschedulable: 0/3 nodes are available" == found.rungs["sums-gpu-1024-0"]


def test_a_label_that_somebody_else_has_written_is_no_attempt() -> None:
    odd = pod("gpu-0")
    odd["metadata"]["labels"][names.ATTEMPT_LABEL] = "one"
    assert [] == reasons(explained(job(status=running()), [odd, *PODS]))


def test_a_former_attempt_that_ended_is_passed_over() -> None:
    old, new = pod("gpu-0", phase="Failed"), pod("gpu-0")
    new["metadata"] |= {"name": "sums-gpu-0-1", "labels": {**old["metadata"]["labels"], names.ATTEMPT_LABEL: "1"}}
    states = pages(**{"sums-gpu-0-1": gpu_page()})
    del states["sums-gpu-0-0"]
    assert [] == reasons(explained(job(status=running()), [old, new, *PODS[1:]], states))


# -------------------------------------------------------------------------------------------------------------- members
def test_a_members_own_problem_comes_with_its_rung_and_remedy() -> None:
    problem = {"reason": "TrainerDied", "message": "rank 0 ended with code 1; last words: out of memory"}
    states = pages(**{"sums-gpu-1-0": gpu_page(problem=problem)})
    found = explained(job(status=running()), states=states)
    assert [("TrainerDied", "sums-gpu-1-0")] == reasons(found)
    text = explanation_text(found)
    for part in ("TrainerDied, sums-gpu-1-0 at Serving", "last words: out of memory", REMEDIES["TrainerDied"].do):
        assert part in text


def test_a_page_is_newer_than_the_status() -> None:
    healed = running(
        outOfLine=[{"name": "sums-gpu-0-0", "rung": "Serving", "reason": "EngineLost", "message": "it died"}]
    )
    assert [] == reasons(explained(job(status=healed)))


def test_without_the_right_to_read_pages_the_status_stands_in() -> None:
    status = running(
        outOfLine=[{"name": "sums-gpu-0-0", "rung": "Drained", "reason": "EngineLost", "message": "it died"}]
    )
    refused = {name: NotAllowed("no right to pods/portforward") for name in pages()}
    found = explained(job(status=status), states=refused)
    assert [("EngineLost", "sums-gpu-0-0")] == reasons(found)
    assert "Drained" == found.causes[0].rung
    assert "3 of 3 members' pages were not read, the status stands in: no right to pods/portforward" == found.notes[0]


def test_a_pod_that_is_silent_under_the_new_epoch_is_named() -> None:
    states = pages(**{"sums-gpu-0-0": gpu_page(epoch=3)})
    found = explained(job(status=running(rung="Unknown")), states=states)
    assert ("MemberSilent", "sums-gpu-0-0") in reasons(found)


def test_open_gates_without_tokens_are_a_problem() -> None:
    states = pages(**{"sums-rollout-0": rollout_page(tokensPerSecond=0.0)})
    found = explained(job(status=running()), states=states)
    assert ([("NothingGenerated", "sums-rollout-0")], True) == (reasons(found), found.is_problem)


@pytest.mark.parametrize("more", [{"samples": {"running": 512}}, {"sealed": SEALED}], ids=["long", "ahead"])
def test_long_responses_and_a_batch_that_waits_for_its_step_are_no_problem(more: Body) -> None:
    states = pages(**{"sums-rollout-0": rollout_page(tokensPerSecond=0.0, **more)})
    found = explained(job(status=running()), states=states)
    assert ([], False) == (reasons(found), found.is_problem)
    assert "tokens/s" not in str(found.waits_for)


def test_gates_that_have_just_opened_have_brought_no_tokens_yet() -> None:
    """The program ended with 1, a problem, when a job was looked at as soon as it was ready."""
    states = pages(**{"sums-rollout-0": rollout_page(tokensPerSecond=0.0)})
    served, now = {"sums-gpu-0-0": NOW.timestamp() - 100}, NOW.timestamp()
    anew = explained(job(status=running()), states=states, since=served | {"sums-gpu-1-0": now - 29})
    assert ([], False) == (reasons(anew), anew.is_problem)
    long = explained(job(status=running()), states=states, since=served | {"sums-gpu-1-0": now - 31})
    assert [("NothingGenerated", "sums-rollout-0")] == reasons(long)


def test_a_page_of_another_version_is_passed_over() -> None:
    odd = {"facts": {"type": "podFacts", "gate": 7}}
    assert [] == reasons(explained(job(status=running()), states=pages(**{"sums-gpu-0-0": odd})))


@pytest.mark.parametrize(
    ("waited", "stragglers"),
    [
        ({"gpu-0": 40, "gpu-1": 2, "gpu-2": 41}, ["gpu-1"]),
        ({"gpu-0": 40, "gpu-1": 2}, ["gpu-1"]),
        ({"gpu-0": 40, "gpu-1": 30, "gpu-2": 41}, []),
        ({"gpu-0": 9, "gpu-1": 0, "gpu-2": 9}, []),
        ({"gpu-0": 40}, []),
        ({"trainer-0": 0, "engine-0": 40, "engine-1": 40}, []),
        ({"trainer-0": 0, "engine-0": 40, "engine-1": 1}, ["engine-1"]),
    ],
    ids=["one of three", "one of two", "alike", "short waits", "alone", "of another role", "one engine"],
)
def test_pod_that_the_others_of_its_role_waited_for_is_named(waited: dict[str, float], stragglers: list[str]) -> None:
    """It hides nothing: what the job waits for is still told, and it is no problem by itself."""
    pods, states = [pod("rollout")], {"sums-rollout-0": rollout_page()}
    for seat, waited_s in waited.items():
        pods.append(pod(seat))
        states[f"sums-{seat}-0"] = gpu_page(waitedS=waited_s)
    found = explained(job(status=running(), replicas=len(waited)), pods, states)
    assert [f"sums-{seat}-0" for seat in stragglers] == [one.pod for one in found.causes if one.reason == "Straggler"]
    if "gpu-0" in waited:
        assert not found.is_problem
        assert found.waits_for


def test_pod_of_an_older_epoch_is_compared_with_nobody() -> None:
    states = pages(**{"sums-gpu-0-0": gpu_page(waitedS=40), "sums-gpu-1-0": gpu_page(waitedS=0, epoch=3)})
    assert [] == [one for one in explained(job(status=running()), states=states).causes if one.reason == "Straggler"]


# ------------------------------------------------------------------------------------------------------------ the table
def reasons_in_sources() -> set[str]:
    """Every reason that a member puts into a Problem: arguments named or placed as one, in agent and rollout."""
    found = set()
    for folder in ("workloads/agent", "workloads/rollout"):
        for file in (CHECKOUT.root / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Call):
                    found |= _reasons_of(node)
    return found


def _reasons_of(call: ast.Call) -> set[str]:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name not in {"Problem", "Wait", "_fail", "_failed", "failed", "_stop", "_replace", "RewardFailed"}:
        return set()
    given = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "reason")]
    texts = [one.value for one in given if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    return {text for text in texts if re.fullmatch(r"([A-Z][a-z]+){2,}", text)}


def test_every_reason_that_a_member_gives_has_a_remedy() -> None:
    given = reasons_in_sources()
    assert len(given) > 15
    assert set() == given - REMEDIES.keys()


def test_every_cause_and_reason_of_the_operator_that_is_trouble_has_a_remedy() -> None:
    trouble = {str(cause) for cause in Cause if cause.is_failure or cause.is_recovery}
    trouble |= {Reason.INVALID_SPEC, Reason.OBJECT_REFUSED, Reason.VOLUME_LOST, Reason.PODS_STARTING, Reason.DELETED}
    assert set() == trouble - REMEDIES.keys()


def test_a_remedy_that_no_job_takes_once_it_exists_says_so() -> None:
    """People were told to raise fields, and the API server refused that."""
    rules = [rule for rule in Rollout.RULES if "once the job exists" in rule.message]
    fixed = {rule.field.rpartition(".")[2] for rule in rules} - {"type", "prompts", "replicas", "placement"}
    assert {"maxStaleness", "batchSize"} <= fixed
    named = re.compile(rf"rollout\.prompts\.|deadlineSeconds of the environment|\b({'|'.join(fixed)})\b")
    told = {reason: remedy.do for reason, remedy in REMEDIES.items() if named.search(remedy.do)}
    assert "TooStale" in told
    assert {} == {reason: do for reason, do in told.items() if "new job" not in do}


def test_no_remedy_is_for_a_reason_that_nobody_gives() -> None:
    texts = "".join(
        file.read_text()
        for folder in ("workloads/agent", "workloads/rollout", "operator/colocated_rl_operator", "operator/cli")
        for file in (CHECKOUT.root / folder).rglob("*.py")
        if file.name != "remedies.py"
    )
    assert set() == {reason for reason in REMEDIES if f'"{reason}"' not in texts}


def test_every_rung_says_who_moves_a_pod_from_it() -> None:
    assert set(Rung) == MOVERS.keys()


def test_the_table_is_in_the_documentation() -> None:
    text = Path(CHECKOUT.root / "docs/cli.md").read_text()
    missing = [
        reason for reason, remedy in REMEDIES.items() if f"| `{reason}` | {remedy.means} | {remedy.do} |" not in text
    ]
    assert [] == missing


# ------------------------------------------------------------------------------------------------------------ failures
def test_the_answer_to_the_last_failure_is_reported_with_its_rule() -> None:
    failures = {"cause": "EngineLost", "action": "ReplacePodElsewhere", "rule": 1, "avoidedNodes": ["node-7"]}
    headline = explained(job(status=running(restarts=1, failures=failures))).headline
    assert headline.endswith(
        "1 of 6 restarts used, last EngineLost: ReplacePodElsewhere (failurePolicy.rules[1]), no GPU pod on node-7"
    )


def test_the_newest_checkpoint_is_reported_with_its_age_until_the_job_is_over() -> None:
    saved = {"step": 40, "time": (NOW - timedelta(minutes=12)).isoformat()}
    headline = explained(job(status=running(checkpoint=saved, mirroredStep=43))).headline
    assert "newest checkpoint of step 40, 12 min old, step 43 in the memory of pods" in headline
    over = [condition("Complete", "True", "Completed")]
    assert "checkpoint" not in explained(job(status=running(checkpoint=saved, conditions=over))).headline


@pytest.mark.parametrize(
    ("restarts", "message"),
    [(0, "0 of 6 restarts used (3 more do not count)"), (1, "1 of 6 restarts used (2 more do not count)"),
     (3, "3 of 6 restarts used, last")],
)  # fmt: skip
def test_restarts_that_did_not_count_are_listed_apart(restarts: int, message: str) -> None:
    failures = {"cause": "PodEvicted", "action": "RestartPod", "podRestarts": 2, "stepRetries": 1}
    assert message in explained(job(status=running(restarts=restarts, failures=failures))).headline


def test_a_queued_job_says_who_was_missing_and_is_no_problem() -> None:
    why = "not every member answered within 60 s: gpu-1 (not scheduled): all pods go, and the job tries again in 40 s"
    conditions = [condition("Reconciling", "True", "PodsReadyDeadlineExceeded", why)]
    found = explained(job(status=running(phase="Queued", rung=None, conditions=conditions)), pods=[], states={})
    assert [("PodsReadyDeadlineExceeded", None)] == reasons(found)
    assert why == found.causes[0].message
    assert not found.is_problem


def test_a_back_off_is_reported_and_is_no_problem() -> None:
    why = "a trainer died at step 2: the trainers start together again, 10 s later"
    conditions = [condition("Ready", "False", "BackingOff", why), condition("Reconciling", "True", "BackingOff", why)]
    found = explained(job(status=running(phase="Recovering", conditions=conditions)))
    assert [("BackingOff", None)] == reasons(found)
    assert why == found.causes[0].message
    assert not found.is_problem
