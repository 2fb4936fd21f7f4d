"""Each action of a failure policy, by the operator's real loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from kopf import DaemonStoppingReason

from builders import make_job
from colocated_rl_api import names
from colocated_rl_api.facts import PodFacts
from colocated_rl_api.member_wire import Goal, PodTarget
from colocated_rl_api.rungs import Rung
from colocated_rl_operator.planner import plan
from colocated_rl_operator.planner.failure_policy import QUEUE_S
from fakes.group import GpuPod
from fakes.world import SPEC, FakeWorld, change, condition, has_failed, stay_in_rollout, stood

YOUNGER = replace(make_job(), created=datetime(2999, 1, 1, tzinfo=UTC))


def answered(cause: str, action: str, *, backoff_s: int = 0, **more: Any) -> pytest.MarkDecorator:
    """The job has a rule for the cause."""
    rules = [{"onCauses": [cause], "action": action, **more}]
    policy = {"rules": rules, "backoffSeconds": backoff_s, "maxBackoffSeconds": 60}
    return pytest.mark.parametrize("world", [SPEC | {"failurePolicy": policy}], indirect=True, ids=[action])


def gpu_pod(world: FakeWorld, seat: str) -> GpuPod:
    pod = world.kubelet.of_seat(seat).pod
    assert isinstance(pod, GpuPod)
    return pod


async def trainer_dies_in_step_2(
    world: FakeWorld, seat: str = "gpu-0", *, lineage: int = 1, before: Callable[[], None] = lambda: None
) -> None:
    """Let a trainer of that lineage die in step 2. The hold on its pod keeps the group
    there. before: called right before.
    """

    def is_in_step_2(target: object) -> bool:
        aim = (target.goal, target.step, target.lineage) if isinstance(target, PodTarget) else None
        return aim == (Goal.CLIMB, 2, lineage) and gpu_pod(world, seat).state.rank.lineage == lineage

    world.kubelet.hold(seat, under=is_in_step_2)
    await world.until(lambda: world.status.get("lineage") == lineage and is_in_step_2(gpu_pod(world, seat).target))
    before()
    assert world.group.trainer_dies(gpu_pod(world, seat))
    world.kubelet.wake_all()


def pods(world: FakeWorld) -> set[str]:
    return {pod["metadata"]["name"] for pod in world.api.all("pods")}


def events(world: FakeWorld, reason: str) -> list[str]:
    return [event["note"] for event in world.api.all("events") if event["reason"] == reason]


def failures(world: FakeWorld) -> dict[str, Any]:
    found: dict[str, Any] = world.status["failures"]
    return found


FIRST = {"sums-gpu-0-0", "sums-gpu-1-0", "sums-rollout-0"}


@answered("TrainerDied", "RetryStep", backoff_s=1)
async def test_a_step_is_retried_after_a_back_off_that_status_and_event_tell_of(world: FakeWorld) -> None:
    seen: list[dict[str, Any]] = []
    world.api.watch(names.PLURAL, lambda event, body: seen.append(body.get("status", {})))
    async with world.operator():
        await trainer_dies_in_step_2(world)
        await world.until(lambda: world.status.get("phase") == "Complete")
    waiting = next(
        item
        for status in seen
        for item in status.get("conditions", [])
        if (item["type"], item["reason"]) == ("Reconciling", "BackingOff")
    )
    assert "True" == waiting["status"]
    assert waiting["message"].endswith("the trainers start together again (failurePolicy.rules[0]), 1 s later")
    assert [waiting["message"]] == events(world, "BackingOff")
    assert FIRST == pods(world)
    counted = failures(world)
    assert ("TrainerDied", "RetryStep", 0) == (counted["cause"], counted["action"], counted["rule"])
    assert (1, 0, 1) == (counted["stepRetries"], counted["podRestarts"], world.status["restarts"])


@answered("TrainerDied", "RollBack", backoff_s=1)
async def test_a_step_is_rolled_back_and_tried_again_after_its_back_off(world: FakeWorld) -> None:
    seen: list[dict[str, Any]] = []
    world.api.watch(names.PLURAL, lambda event, body: seen.append(body.get("status", {})))
    async with world.operator():
        await trainer_dies_in_step_2(world)
        await world.until(lambda: world.status.get("phase") == "Complete")
    assert {1: [1], 2: [1, 2, 3]} == world.group.trained_in
    between = [status for status in seen if status.get("weightVersion") == "1-2"]
    assert "Rollout" in {status["phase"] for status in between}
    assert ["step 2 failed 1 time: rollout continues before it is retried"] == events(world, "BackingOff")
    assert (3, 1, FIRST) == (world.status["step"], world.status["restarts"], pods(world))
    assert (0, 1) == (failures(world)["podRestarts"], failures(world)["stepRetries"])


SHORT = {"settleSeconds": 1, "engineCallSeconds": 2}


@pytest.mark.parametrize(
    "world",
    [
        SPEC
        | {
            "switch": SHORT,
            "failurePolicy": {
                "rules": [{"onCauses": ["RungDeadlineExceeded"], "atRungs": ["Sealed"], "action": "RestartPod"}],
                "backoffSeconds": 0,
            },
        }
    ],
    indirect=True,
    ids=["RestartPod"],
)
async def test_f81_past_the_deadline_of_a_rung_the_rule_for_it_is_applied(
    world: FakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "MARGIN_S", 0.0)

    def is_in_step_2(target: object) -> bool:
        return isinstance(target, PodTarget) and (target.step, target.lineage) == (2, 1)

    async with world.operator():
        world.kubelet.hold("gpu-1", under=is_in_step_2)  # it stays at Sealed, and the other one at Paused
        await world.until(lambda: world.status.get("phase") == "Complete")
    told = failures(world)
    assert ("RungDeadlineExceeded", "RestartPod", 0) == (told["cause"], told["action"], told["rule"])
    assert FIRST - {"sums-gpu-1-0"} | {"sums-gpu-1-1"} == pods(world)


@answered("TrainerDied", "RestartPod")
async def test_a_pod_whose_trainer_died_is_made_again(world: FakeWorld) -> None:
    async with world.operator():
        await trainer_dies_in_step_2(world, "gpu-1")
        await world.until(lambda: world.status.get("phase") == "Complete")
    assert FIRST - {"sums-gpu-1-0"} | {"sums-gpu-1-1"} == pods(world)
    assert (1, 1, 0) == (world.status["restarts"], failures(world)["podRestarts"], failures(world)["stepRetries"])


@answered("TrainerDied", "ReplacePodElsewhere")
async def test_a_pod_is_replaced_on_another_node_and_a_new_operator_still_avoids_the_old_one(world: FakeWorld) -> None:
    async with world.operator():
        await trainer_dies_in_step_2(world)
        await world.until(lambda: any(pod["metadata"].get("deletionTimestamp") for pod in world.api.all("pods")))
    async with world.operator():
        await world.until(lambda: world.status.get("phase") == "Complete")
    made = next(pod for pod in world.api.all("pods") if pod["metadata"]["labels"].get(names.REPLICA_LABEL) == "0")
    [term] = made["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"
    ]
    assert {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["node-0"]}]} == term
    assert "node-1" == made["spec"]["nodeName"]
    assert (["node-0"], 1) == (failures(world)["avoidedNodes"], world.status["restarts"])


async def test_a_pod_in_which_the_trainers_of_a_step_die_twice_is_made_again_on_another_node(world: FakeWorld) -> None:
    """Another operator sees the second death: which pod the first was in is in the status."""
    change(world, failurePolicy={"backoffSeconds": 0})
    async with world.operator():
        await trainer_dies_in_step_2(world, "gpu-1")
        await world.until(lambda: world.status.get("lineage") == 2)
    assert ("sums-gpu-1-0", "RetryStep") == (failures(world)["pod"], failures(world)["action"])
    async with world.operator():
        await trainer_dies_in_step_2(world, "gpu-1", lineage=2)
        await world.until(lambda: world.status.get("phase") == "Complete")
    assert FIRST - {"sums-gpu-1-0"} | {"sums-gpu-1-1"} == pods(world)
    made = next(pod for pod in world.api.all("pods") if pod["metadata"]["name"] == "sums-gpu-1-1")
    assert ("node-2", ["node-1"]) == (made["spec"]["nodeName"], failures(world)["avoidedNodes"])
    assert 2 == world.status["restarts"]


NODE = "/api/v1/nodes/node-1"
UNFIT = {"key": "rl.colocate.dev/unfit", "value": "BadDevice", "effect": "NoSchedule"}
OTHER = {"key": "example.com/other", "effect": "NoExecute"}


async def device_breaks(world: FakeWorld) -> None:
    """The kubelet of node-1 reports a device of the pod there as unhealthy, and the job completes elsewhere."""
    await world.until(lambda: world.status.get("phase") == "Rollout")
    path = "/api/v1/namespaces/default/pods/sums-gpu-1-0"
    ill = {"name": "nvidia.com/gpu", "resources": [{"resourceID": "GPU-1", "health": "Unhealthy"}]}
    gpu = {"name": "gpu", "allocatedResourcesStatus": [ill]}
    world.api.set_status(path, world.api.objects[path]["status"] | {"containerStatuses": [gpu]})
    await world.until(lambda: world.status.get("phase") == "Complete")
    assert "BadDevice" == failures(world)["cause"]


@pytest.mark.parametrize("refused", [("PATCH", "/networkpolicies/"), ("DELETE", "/pods/sums-gpu-1-0")], ids=str)
async def test_a_pod_that_can_not_be_deleted_is_answered_once_and_not_for_ever(
    world: FakeWorld, refused: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group formed with it again, and its device was bad: thirty epochs a second, each of them written."""
    monkeypatch.setattr("colocated_rl_operator.loop.objects.STALL_RETRY_S", 0.2)
    stay_in_rollout(world)
    async with world.operator():
        await world.until(lambda: world.status.get("phase") == "Rollout")
    world.api.forbidden = lambda method, path: method == refused[0] and refused[1] in path
    async with world.operator() as operator:
        await world.until(lambda: world.status.get("cause") == "OperatorRestarted")
        breaking = asyncio.create_task(device_breaks(world))
        await world.until(lambda: world.status.get("cause") == "PodReplaced" and events(world, "ObjectRefused"))
        await asyncio.sleep(1)  # nothing is to happen
        assert 1 == failures(world)["podRestarts"]
        world.api.forbidden = lambda method, path: False
        world.kubelet.release("rollout")
        while not breaking.done():
            operator.context.wakeups.wake(world.body["metadata"]["uid"])
            await asyncio.sleep(0.1)
        await breaking
    assert "sums-gpu-1-0" not in pods(world)


@pytest.mark.parametrize("answers", ["at once", "once it has panicked", "after another change"])
async def test_a_node_with_a_bad_device_is_tainted_where_an_admin_allows_it(world: FakeWorld, answers: str) -> None:
    world.api.put(NODE, {"metadata": {"name": "node-1"}, "spec": {"taints": [OTHER]}})
    world.api.panics = lambda method, path: (
        answers == "once it has panicked" and path == NODE and [] == asked_of_node(world)[1:]
    )

    def changes_once(method: str, path: str) -> bool:
        if answers == "after another change" and method == "PATCH" and path == NODE and not asked_of_node(world)[2:]:
            world.api.put(NODE, world.api.objects[NODE])  # its kubelet writes to it
        return False

    world.api.forbidden = changes_once
    async with world.operator(taints_nodes=True):
        await device_breaks(world)
    assert [OTHER, UNFIT] == world.api.objects[NODE]["spec"]["taints"]
    expected = {"at once": "GET PATCH", "once it has panicked": "GET GET PATCH"}
    assert expected.get(answers, "GET PATCH GET PATCH").split() == asked_of_node(world)
    [told] = events(world, "NodeTainted")
    assert "node node-1 has a bad device and is tainted: rl.colocate.dev/unfit=BadDevice:NoSchedule" == told


@pytest.mark.parametrize(
    ("node", "is_allowed", "asked"),
    [("usual", False, []), ("gone", True, ["GET"]), ("tainted", True, ["GET"]), ("forbidden", True, ["GET"])],
)
async def test_a_job_goes_on_whatever_becomes_of_the_taint(
    world: FakeWorld, node: str, is_allowed: bool, asked: list[str]
) -> None:
    taints = [UNFIT] if node == "tainted" else []
    if node != "gone":
        world.api.put(NODE, {"metadata": {"name": "node-1"}, "spec": {"taints": taints}})
    world.api.forbidden = lambda method, path: node == "forbidden" and path == NODE
    async with world.operator(taints_nodes=is_allowed):
        await device_breaks(world)
    assert asked == asked_of_node(world)
    assert [] == events(world, "NodeTainted")
    assert taints == world.api.objects.get(NODE, {"spec": {"taints": taints}})["spec"]["taints"]


def asked_of_node(world: FakeWorld) -> list[str]:
    return [asked.split()[0] for asked in world.api.requests if asked.endswith(NODE)]


@answered("TrainerDied", "FailJob")
async def test_a_job_fails_by_a_rule_and_its_condition_names_both(world: FakeWorld) -> None:
    async with world.operator():
        await trainer_dies_in_step_2(world)
        await world.until(lambda: has_failed(world))
    assert ("True", "FailurePolicy") == condition(world, "Failed")
    message = next(item["message"] for item in world.status["conditions"] if item["type"] == "Failed")
    assert message.startswith("a trainer died at step 2: sums-gpu-0-0")
    assert message.endswith(
        "the job fails (failurePolicy.rules[0]); to continue it: kubectl crlj retry -n default sums"
    )
    assert [message] == events(world, "FailurePolicy")


@answered("TrainerDied", "FailJob")
async def test_a_failed_job_is_retried_under_the_next_operator_and_trains_nothing_twice(world: FakeWorld) -> None:
    async with world.operator():
        await trainer_dies_in_step_2(world)
        await world.until(lambda: has_failed(world))
    epoch, done = world.status["epoch"], {step for steps in world.group.trained_in.values() for step in steps}
    assert {1} == done
    async with world.operator():
        change(world, retries=1)
        await world.until(lambda: world.status.get("phase") == "Complete")
    assert (1, "False", "False") == (
        world.status["retries"],
        condition(world, "Failed")[0],
        condition(world, "Stalled")[0],
    )
    assert world.status["epoch"] > epoch
    assert {1: [1], 2: [1, 2, 3]} == world.group.trained_in
    assert ["sums-gpu-0-1", "sums-gpu-1-1", "sums-rollout-1"] == sorted(pods(world))
    assert 1 == len(events(world, "Retried"))


@answered("OutOfMemory", "RetryStep")
async def test_a_death_by_memory_is_distinguished_from_a_later_one_by_itself(world: FakeWorld) -> None:
    def is_killed() -> None:
        path = f"/api/v1/namespaces/default/pods/{world.kubelet.of_seat('gpu-0').server.hello.pod}"
        ended = {"exitCode": 137, "reason": "OOMKilled"}
        gpu = {"name": "gpu", "restartCount": 1, "state": {"running": {}}, "lastState": {"terminated": ended}}
        world.api.set_status(path, {**world.api.objects[path]["status"], "containerStatuses": [gpu]})

    async with world.operator():
        await trainer_dies_in_step_2(world, before=is_killed)
        await world.until(lambda: world.status.get("failures", {}).get("cause") == "OutOfMemory")
        await trainer_dies_in_step_2(world, lineage=2)
        await world.until(lambda: world.status.get("failures", {}).get("cause") == "TrainerDied")
        await world.until(lambda: world.status.get("phase") == "Complete")
    assert 2 == world.status["restarts"]


@pytest.mark.parametrize("world", [SPEC | {"backoffLimit": 1}], indirect=True, ids=["backoffLimit 1"])
async def test_a_job_near_its_backoff_limit_is_counted_until_it_is_over(world: FakeWorld) -> None:
    async with world.operator() as operator:

        def near() -> float | None:
            return operator.metrics.registry.get_sample_value("colocated_rl_operator_jobs_near_backoff_limit")

        assert 0 == near()
        await trainer_dies_in_step_2(world)
        await world.until(lambda: near() == 1)
        await world.until(lambda: world.status.get("phase") == "Complete")
        await world.until(lambda: near() == 0)
    assert 1 == world.status["restarts"]


ENGINES = [
    {"onCauses": ["EngineLost"], "action": "RestartEngine", "maxTries": 1},
    {"onCauses": ["EngineLost"], "action": "ReplacePodElsewhere"},
]


@pytest.mark.parametrize("world", [SPEC | {"failurePolicy": {"rules": ENGINES}}], indirect=True, ids=["RestartEngine"])
async def test_an_engine_is_started_again_by_its_agent_before_its_pod_is_replaced(world: FakeWorld) -> None:
    def is_step_2(target: object) -> bool:
        return isinstance(target, PodTarget) and target.step == 2 and target.goal is Goal.CLIMB

    async with world.operator():
        world.kubelet.hold("rollout", under=lambda target: target.type == "rolloutTarget" and target.trained_step == 1)
        await world.until(lambda: world.status.get("phase") == "Rollout" and world.status.get("step", 0) >= 1)
        assert world.group.engine_dies(gpu_pod(world, "gpu-0"))
        world.kubelet.wake_all()
        await world.until(lambda: gpu_pod(world, "gpu-0").state.gate_open)
        assert FIRST == pods(world)
        world.kubelet.hold("gpu-1", under=is_step_2)
        pod = gpu_pod(world, "gpu-0")
        pod.engine_failures = 2  # since it last served
        world.kubelet.wake_all()
        await world.until(lambda: "sums-gpu-0-1" in pods(world))
        world.kubelet.release("gpu-1")
        world.kubelet.release("rollout")
        await world.until(lambda: world.status.get("phase") == "Complete")
    assert ["node-0"] == failures(world)["avoidedNodes"]


UNFORGIVING = SPEC | {"backoffLimit": 0}
unforgiving = pytest.mark.parametrize("world", [UNFORGIVING], indirect=True, ids=["backoffLimit 0"])
COUNTED = {"rules": [{"onCauses": ["PodEvicted"], "action": "RestartPod", "counts": True}]}


def taken_away(world: FakeWorld, name: str) -> None:
    """The API server hears of an eviction: the processes have ended by then."""
    evicted = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
    path = f"/api/v1/namespaces/default/pods/{name}"
    world.api.set_status(path, {"phase": "Failed", "conditions": [evicted]})


@unforgiving
async def test_a_drain_of_which_the_agents_tell_first_costs_no_restart(world: FakeWorld) -> None:
    """Trainers of the pod end, others lose their collectives, and the API server hears of it last."""
    async with world.operator() as operator:
        world.kubelet.hold("gpu-1", under=lambda target: target.type == "podTarget" and target.step == 2)
        await world.until(lambda: any(stood(world, Rung.SEALED, step=2)))
        drained, victim = world.kubelet.of_seat("gpu-1"), gpu_pod(world, "gpu-1")
        assert world.group.pod_is_drained(victim)
        assert world.group.trainer_dies(victim)
        drained.wake()
        name, job_uid = drained.server.hello.pod, world.body["metadata"]["uid"]

        def is_heard(name: str) -> bool:
            facts = operator.context.doors.members.answers(job_uid)[name].facts
            return isinstance(facts, PodFacts) and not facts.trainers[0].is_alive

        await world.until(lambda: is_heard(name))
        other = world.kubelet.of_seat("gpu-0")
        assert world.group.trainer_dies(gpu_pod(world, "gpu-0"))
        other.wake()
        await world.until(lambda: is_heard(other.server.hello.pod))
        world.kubelet.end(victim.uid)
        taken_away(world, name)
        world.kubelet.release("gpu-1")
        await world.until(lambda: world.status.get("completionTime"))
    assert ("Complete", 0) == (world.status["phase"], world.status["restarts"])
    assert ("PodEvicted", 1, 0) == tuple(failures(world)[each] for each in ("cause", "podRestarts", "stepRetries"))
    [event] = events(world, "PodReplaced")
    assert event.endswith("the trainers start together again, which does not count against backoffLimit")


@unforgiving
async def test_a_drain_that_the_watch_has_not_told_of_is_looked_for_before_a_death_is_counted(world: FakeWorld) -> None:
    """The agent of the drained pod has not reported it either: others' trainers, which
    end because of it, are heard of first.
    """
    async with world.operator():
        world.kubelet.hold("gpu-1", under=lambda target: target.type == "podTarget" and target.step == 2)
        await world.until(lambda: any(stood(world, Rung.SEALED, step=2)))
        victim = world.kubelet.of_seat("gpu-1")
        path = f"/api/v1/namespaces/default/pods/{victim.server.hello.pod}"
        ending = {"deletionTimestamp": "2999-01-01T00:00:00Z", "deletionGracePeriodSeconds": 60}
        watchers, world.api.watchers = world.api.watchers, []
        world.kubelet.blocked = {"sums-gpu-1-1"}  # until the other is gone
        world.api.put(path, world.api.objects[path] | {"metadata": world.api.objects[path]["metadata"] | ending})
        world.api.watchers = watchers
        assert world.group.trainer_dies(gpu_pod(world, "gpu-0"))
        world.kubelet.of_seat("gpu-0").wake()
        again = path.replace("gpu-1-0", "gpu-1-1")
        await world.until(lambda: again in world.api.objects or "completionTime" in world.status)
        world.kubelet.end(victim.pod.uid)
        world.api.remove(path)
        world.kubelet.release("gpu-1")
        world.kubelet.blocked = set()
        world.kubelet.note("MODIFIED", world.api.objects[again])
        await world.until(lambda: world.status.get("completionTime"))
    assert ("Complete", 0) == (world.status["phase"], world.status["restarts"])


RARELY_SAVED = UNFORGIVING | {"checkpoint": {"everySteps": 100}}


@pytest.mark.parametrize("world", [RARELY_SAVED], indirect=True, ids=["rarely saved"])
@pytest.mark.parametrize("seat", ["gpu-0", "gpu-1"])
async def test_a_pod_that_is_deleted_while_its_group_rests_takes_no_step_with_it(world: FakeWorld, seat: str) -> None:
    """Step 1 is in no checkpoint. The group saves it within the pod's grace, while another pod waits in its seat."""
    world.kubelet.hold("rollout", under=lambda target: target.type == "rolloutTarget" and target.trained_step > 0)
    async with world.operator():
        await world.until(lambda: world.status.get("phase") == "Rollout" and world.status["step"] == 1)
        victim = world.kubelet.of_seat(seat)
        path = f"/api/v1/namespaces/default/pods/{victim.server.hello.pod}"
        again, successor = path.replace(f"{seat}-0", f"{seat}-1"), f"sums-{seat}-1"
        ending = {"deletionTimestamp": "2999-01-01T00:00:00Z", "deletionGracePeriodSeconds": 60}
        world.kubelet.is_patient, world.kubelet.blocked = True, {successor}
        world.api.put(path, world.api.objects[path] | {"metadata": world.api.objects[path]["metadata"] | ending})
        await world.until(lambda: again in world.api.objects and world.group.saved == 1)
        assert world.group.pod_is_drained(gpu_pod(world, seat))
        victim.wake()
        await world.until(lambda: not victim.pod.alive)
        world.api.remove(path)
        world.kubelet.blocked = set()
        world.kubelet.note("MODIFIED", world.api.objects[again])
        await world.until(lambda: world.status.get("lineage") == 2)
        world.kubelet.release("rollout")
        await world.until(lambda: world.status.get("completionTime"))
    assert ("Complete", 0) == (world.status["phase"], world.status["restarts"])
    assert {1: [1], 2: [2, 3]} == world.group.trained_in


@unforgiving
async def test_one_death_ends_a_job_that_may_not_fail_once(world: FakeWorld) -> None:
    async with world.operator():
        await trainer_dies_in_step_2(world)
        await world.until(lambda: has_failed(world))
    assert ("True", "BackoffLimitExceeded") == condition(world, "Failed")


@pytest.mark.parametrize("world", [SPEC | {"failurePolicy": COUNTED}], indirect=True, ids=["counts"])
async def test_a_rule_may_count_evictions(world: FakeWorld) -> None:
    stay_in_rollout(world)
    async with world.operator():
        await world.until(lambda: world.status.get("phase") == "Rollout")
        victim = world.kubelet.of_seat("gpu-1")
        world.kubelet.end(victim.pod.uid)
        taken_away(world, victim.server.hello.pod)
        await world.until(lambda: world.status["cause"] == "PodReplaced")
        assert (1, 1) == (world.status["restarts"], failures(world)["podRestarts"])


@answered("PodEvicted", "RestartPod", counts=False)
async def test_an_eviction_that_does_not_count_leaves_the_limit_alone(world: FakeWorld) -> None:
    async with world.operator():
        world.kubelet.hold("rollout", under=lambda target: target.type == "rolloutTarget" and target.trained_step == 1)
        await world.until(lambda: world.status.get("phase") == "Rollout" and world.status.get("step", 0) >= 1)
        victim = world.kubelet.of_seat("gpu-1")
        world.kubelet.end(victim.pod.uid)
        evicted = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
        path = f"/api/v1/namespaces/default/pods/{victim.server.hello.pod}"
        world.api.set_status(path, {"phase": "Failed", "conditions": [evicted]})
        await world.until(lambda: world.status["cause"] == "PodReplaced")
        world.kubelet.release("rollout")
        await world.until(lambda: world.status.get("phase") == "Complete")
    assert (0, 1, "PodEvicted") == (
        world.status["restarts"],
        failures(world)["podRestarts"],
        failures(world)["cause"],
    )


@pytest.mark.parametrize("world", [SPEC | {"podsReadyDeadlineSeconds": 3600}], indirect=True, ids=["Requeue"])
async def test_a_job_without_room_gives_its_devices_back_and_completes_when_there_is_room(world: FakeWorld) -> None:
    waited_s = 0.0
    world.kubelet.blocked = {"sums-gpu-1-0"}
    async with world.operator(clock=lambda: time.monotonic() + waited_s) as operator:
        await world.until(lambda: len(world.kubelet.members) == 2 and world.status.get("phase") == "Pending")
        waited_s += 3600
        operator.context.wakeups.wake(world.body["metadata"]["uid"])
        await world.until(lambda: world.status.get("phase") == "Queued" and not world.api.all("pods"))
        for kind in ("Ready", "PodsReady"):
            assert ("False", "PodsReadyDeadlineExceeded") == condition(world, kind)
        assert ("True", "PodsReadyDeadlineExceeded") == condition(world, "Reconciling")
        [why] = events(world, "PodsReadyDeadlineExceeded")
        assert why in {item["message"] for item in world.status["conditions"] if item["type"] == "PodsReady"}
        assert "Nobody" == world.status["gpuHolder"]
        await world.until(lambda: operator.context.doors.queue.has_elder(YOUNGER))
        world.kubelet.blocked = set()
        waited_s += 2 * QUEUE_S
        operator.context.wakeups.wake(world.body["metadata"]["uid"])
        await world.until(lambda: world.status.get("phase") == "Complete")
    assert (0, "Requeue") == (world.status["restarts"], failures(world)["action"])
    assert not operator.context.doors.queue.has_elder(YOUNGER)


@pytest.mark.parametrize("world", [SPEC | {"podsReadyDeadlineSeconds": 1}], indirect=True, ids=["Requeue"])
async def test_a_queued_job_that_is_deleted_is_before_nobody(world: FakeWorld) -> None:
    world.kubelet.blocked = {"sums-gpu-1-0"}
    async with world.operator() as operator:
        await world.until(lambda: world.status.get("phase") == "Queued" and not world.api.all("pods"))
        operator.stopper.set(DaemonStoppingReason.RESOURCE_DELETED)
        await world.until(operator.task.done)
    assert not operator.context.doors.queue.has_elder(YOUNGER)


@pytest.mark.parametrize("world", [SPEC | {"podsReadyDeadlineSeconds": 1}], indirect=True, ids=["Requeue"])
async def test_a_queued_job_that_another_operator_has_is_before_nobody(world: FakeWorld) -> None:
    """Jobs of the former operator waited for the later half of their delay as long as it ran."""
    world.kubelet.blocked = {"sums-gpu-1-0"}
    async with world.operator() as former:
        await world.until(lambda: former.context.doors.queue.has_elder(YOUNGER) and not world.api.all("pods"))
        async with world.operator(release="others/lease", takes_over=frozenset({"operators/lease"})):
            await world.until(lambda: world.status["operator"] == "others/lease")
            change(world, steps=4)  # both look at it
            await world.until(lambda: any(each["reason"] == "AnotherOperator" for each in world.api.all("events")))
        assert not former.context.doors.queue.has_elder(YOUNGER)
