"""The plan answers failures by the job's policy, and by the usual answers without one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from builders import (
    absent_trainer,
    facts_at,
    make_climb,
    make_job,
    make_manifest,
    make_member,
    make_observation,
    rollout_facts,
)
from colocated_rl_api import names
from colocated_rl_api.facts import PodFacts, Problem
from colocated_rl_api.failure import FailureAction, FailureCause
from colocated_rl_api.job import ColocatedRLJobSpec
from colocated_rl_api.ladder import TIME_SLICED
from colocated_rl_api.member_wire import Goal, PodTarget
from colocated_rl_api.names import PodUid
from colocated_rl_api.rungs import Rung, WeightVersion
from colocated_rl_operator.planner.actions import CreatePod, DeletePod, TaintNode
from colocated_rl_operator.planner.failure_policy import (
    MAX_QUEUE_S,
    QUEUE_S,
    listed,
    queue_s,
    taints,
)
from colocated_rl_operator.planner.observation import (
    MAX_AVOIDED,
    Climb,
    FailureTally,
    Member,
    Memory,
    Observation,
    PodPhase,
    remember,
)
from colocated_rl_operator.planner.plan import Plan, patience_s, plan
from colocated_rl_operator.planner.reasons import Cause, Waiting
from colocated_rl_operator.planner.silence import SILENCE_S

V2 = WeightVersion(2, 1)


def policy(*rules: dict[str, Any], backoff_s: int = 0, most_s: int = 300) -> dict[str, Any]:
    return {"rules": list(rules), "backoffSeconds": backoff_s, "maxBackoffSeconds": most_s}


def rule(*causes: str, action: str, **more: Any) -> dict[str, Any]:
    return {"onCauses": list(causes), "action": action, **more}


def climbing(*rungs: Rung, failure_policy: dict[str, Any] | None = None, **spec: Any) -> Observation:
    """A group at these rungs on its way to step 2 of 3, epoch 5; step 1 is trained. Pods stand on node-0, node-1."""
    if failure_policy is not None:
        spec["failurePolicy"] = failure_policy
    climb = make_climb(2, epoch=5, cause=Cause.NEXT_STEP)
    pods: list[PodFacts | None] = [facts_at(rung, V2, epoch=5) for rung in rungs]
    job = make_job(replicas=len(rungs), **spec)
    seen = make_observation(job, pods, climb=climb, rollout=rollout_facts(sealed=2, trained=1), trained_step=1)
    members = [replace(member, node=f"node-{place}") for place, member in enumerate(seen.members)]
    return remember(replace(seen, members=tuple(members)))


def changed(seen: Observation, index: int, **changes: Any) -> Observation:
    members = list(seen.members)
    members[index] = replace(members[index], **changes)
    return remember(replace(seen, members=tuple(members)))


def dead(seen: Observation, index: int = 0, **changes: Any) -> Observation:
    """A trainer of that pod has ended."""
    facts = seen.members[index].pod_facts
    assert facts is not None
    assert seen.climb is not None
    died = absent_trainer(seen.climb.lineage, exit_code=1)
    problem = Problem(reason="TrainerDied", message="rank 0 ended with code 1; last words: no such file")
    facts_after = facts.model_copy(update={"trainers": (died,), "problem": problem})
    return changed(seen, index, facts=facts_after, **changes)


def later(seen: Observation, seconds: float) -> Observation:
    return remember(replace(seen, now=seen.now + seconds))


def following(seen: Observation, decided: Plan) -> Observation:
    """Return what is seen once the plan was carried out: the epoch is recorded, pods are deleted and made."""
    members = [
        replace(member, ends_at=seen.now + 60.0, facts=None)
        if any(isinstance(each, DeletePod) and each.uid == member.uid for each in decided.pods)
        else member
        for member in seen.members
    ]
    members += [make_member(each.seat, each.attempt) for each in decided.pods if isinstance(each, CreatePod)]
    memory = replace(seen.memory, raised=seen.memory.raised or decided.raises)
    return remember(replace(seen, members=tuple(members), climb=decided.climb, memory=memory))


def climb_of(decided: Plan) -> Climb:
    assert decided.raises
    assert decided.climb is not None
    return decided.climb


def gone(decided: Plan) -> list[str]:
    return [each.name for each in decided.pods if isinstance(each, DeletePod)]


# ---------------------------------------------------------------------------------------------------------- the table
@pytest.mark.parametrize("cause", FailureCause)
def test_every_cause_has_a_usual_answer_and_can_end_the_job(cause: FailureCause) -> None:
    assert len(set(cause.answers)) == len(cause.answers) > 1
    assert FailureAction.FAIL_JOB in cause.answers


def test_every_action_answers_something() -> None:
    assert set(FailureAction) == {action for cause in FailureCause for action in cause.answers}


# ------------------------------------------------------------------------------------------------ of a trainer's death
def test_without_a_policy_the_trainers_start_together_again() -> None:
    decided = plan(dead(climbing(Rung.RELEASED, Rung.RELEASED)))
    climb = climb_of(decided)
    assert (2, 2, 1, Cause.TRAINER_DIED) == (climb.step, climb.lineage, climb.restarts, climb.cause)
    tally = FailureTally(step_retries=1, step=2, tries=1, cause="TrainerDied", action="RetryStep", counted=(2,))
    assert replace(tally, pod="sums-gpu-0-0") == climb.tally
    assert [] == gone(decided)
    assert (
        "a trainer died at step 2: sums-gpu-0-0 (rank 0 ended with code 1; last words: no such file): "
        "the trainers start together again" == decided.message
    )


def test_the_first_rule_that_matches_is_followed_and_named() -> None:
    rules = policy(
        rule("RungDeadlineExceeded", action="FailJob"),
        rule("TrainerDied", action="RestartPod"),
        rule("TrainerDied", action="FailJob"),
    )
    decided = plan(dead(climbing(Rung.RELEASED, Rung.RELEASED, failure_policy=rules)))
    assert ["sums-gpu-0-0"] == gone(decided)
    assert decided.message.endswith("sums-gpu-0-0 recreated (failurePolicy.rules[1])")
    assert (1, "RestartPod") == (climb_of(decided).tally.rule, climb_of(decided).tally.action)


def test_a_rule_of_another_cause_leaves_the_usual_answer() -> None:
    rules = policy(rule("RungDeadlineExceeded", action="FailJob"))
    climb = climb_of(plan(dead(climbing(Rung.RELEASED, Rung.RELEASED, failure_policy=rules))))
    assert (Cause.TRAINER_DIED, None) == (climb.cause, climb.tally.rule)


def test_fail_job_ends_the_job_with_the_failure_in_its_message() -> None:
    rules = policy(rule("TrainerDied", action="FailJob"), backoff_s=60)
    decided = plan(dead(climbing(Rung.RELEASED, Rung.RELEASED, failure_policy=rules)))
    assert Cause.FAILURE_POLICY is climb_of(decided).cause
    assert {Goal.STOP} == {target.goal for target in decided.targets.values() if isinstance(target, PodTarget)}
    assert "no such file" in decided.message
    assert decided.message.endswith(
        "the job fails (failurePolicy.rules[0]); to continue it: kubectl crlj retry -n default sums"
    )


NAN = "gradient norm of step 2 is nan: lower learningRate in spec.trainer.config"


def diverged(seen: Observation, index: int = 0, *, lineage: int | None = None, **changes: Any) -> Observation:
    """A trainer of that pod has ended, and reported that it would end again."""
    seen = dead(seen, index)
    facts = seen.members[index].pod_facts
    assert facts is not None
    [rank] = facts.trainers
    told = rank.model_copy(update={"not_retriable": NAN} | ({} if lineage is None else {"lineage": lineage}))
    return changed(seen, index, facts=facts.model_copy(update={"trainers": (told,)}), **changes)


@pytest.mark.parametrize("backoff_s", [0, 60])
@pytest.mark.parametrize("memory_kills", [0, 1])
def test_a_trainer_that_would_end_again_ends_the_job_at_once_and_says_what_to_do(
    backoff_s: int, memory_kills: int
) -> None:
    """The same batch was trained until no restart was left, and the message had the place in the code alone."""
    seen = climbing(Rung.RELEASED, Rung.RELEASED, failure_policy=policy(backoff_s=backoff_s))
    decided = plan(diverged(seen, 1, memory_kills=memory_kills))
    climb = climb_of(decided)
    assert (Cause.FAILURE_POLICY, "NotRetriable", "FailJob", None) == (
        climb.cause,
        climb.tally.cause,
        climb.tally.action,
        climb.tally.rule,
    )
    assert (
        f"a trainer ended at step 2, and would end again: {NAN}: the job fails; suspend the job and change what is "
        "named; to continue it: kubectl crlj retry -n default sums" == decided.message
    )
    assert [] == gone(decided)


@pytest.mark.parametrize("backoff_s", [0, 60])
def test_a_trainer_that_says_why_it_ends_ends_the_job_though_a_peer_is_seen_to_end_first(backoff_s: int) -> None:
    """The peer's collective broke. Without a back-off the step was tried again, and nobody learned of the reason."""
    seen = dead(climbing(Rung.RELEASED, Rung.RELEASED, failure_policy=policy(backoff_s=backoff_s)), 1)
    facts = seen.members[0].pod_facts
    assert facts is not None
    ending = facts.trainers[0].model_copy(update={"not_retriable": NAN})
    decided = plan(changed(seen, 0, facts=facts.model_copy(update={"trainers": (ending,)})))
    assert ("NotRetriable", True) == (climb_of(decided).tally.cause, NAN in decided.message)


def test_a_death_is_answered_as_one_that_would_come_again_once_its_report_is_there() -> None:
    seen = dead(climbing(Rung.RELEASED, Rung.RELEASED, failure_policy=policy(backoff_s=60)))
    assert not plan(seen).raises, "it waits for the back-off"
    assert Cause.FAILURE_POLICY is climb_of(plan(diverged(seen))).cause


def test_a_report_of_an_older_lineage_ends_nothing() -> None:
    seen = climbing(Rung.RELEASED, Rung.RELEASED, failure_policy=policy())
    assert not plan(diverged(seen, lineage=0)).raises


def test_a_rule_may_try_once_more_what_a_trainer_takes_for_hopeless() -> None:
    rules = policy(rule("NotRetriable", action="RetryStep", maxTries=1))
    seen = diverged(climbing(Rung.RELEASED, Rung.RELEASED, failure_policy=rules))
    first = climb_of(plan(seen))
    assert (Cause.TRAINER_DIED, "NotRetriable", 1) == (first.cause, first.tally.cause, first.restarts)
    again = changed(following(seen, plan(seen)), 0, facts=facts_at(Rung.RELEASED, V2, epoch=6))
    again = changed(again, 1, facts=facts_at(Rung.RELEASED, V2, epoch=6))
    assert Cause.FAILURE_POLICY is climb_of(plan(diverged(again))).cause


def test_a_pod_made_again_costs_one_restart_and_its_trainers_wait_for_it() -> None:
    rules = policy(rule("TrainerDied", action="RestartPod"))
    seen = dead(climbing(Rung.RELEASED, Rung.RELEASED, failure_policy=rules))
    decided = plan(seen)
    climb = climb_of(decided)
    assert ("", 1, 1, Cause.POD_REPLACED) == (climb.group, climb.restarts, climb.tally.pod_restarts, climb.cause)
    assert {} == decided.targets
    seen = following(seen, decided)
    decided = plan(seen)
    assert not decided.raises
    assert (CreatePod("gpu-0", 1),) == decided.pods
    seen = following(seen, decided)
    assert not plan(seen).raises
    fresh = next(index for index, member in enumerate(seen.members) if member.name == "sums-gpu-0-1")
    again = plan(changed(seen, fresh, facts=facts_at(Rung.RELEASED, V2, epoch=0)))
    climb = climb_of(again)
    assert (2, 2, 1, Cause.POD_REPLACED) == (climb.step, climb.lineage, climb.restarts, climb.cause)
    assert climb.group
    assert 0 == climb.tally.step_retries


def test_a_pod_replaced_elsewhere_avoids_its_node_and_so_do_all_later_ones() -> None:
    rules = policy(rule("TrainerDied", action="ReplacePodElsewhere"))
    seen = dead(climbing(Rung.RELEASED, Rung.RELEASED, failure_policy=rules), 1)
    decided = plan(seen)
    assert ("node-1",) == climb_of(decided).tally.avoids
    assert "sums-gpu-1-0 recreated, not on node-1" in decided.message
    seen = following(seen, decided)
    assert (CreatePod("gpu-1", 1, avoids=("node-1",)),) == plan(seen).pods
    other = changed(seen, 0, phase=PodPhase.FAILED, facts=None)
    assert {("gpu-0", ("node-1",)), ("gpu-1", ("node-1",))} == {
        (each.seat, each.avoids) for each in plan(other).pods if isinstance(each, CreatePod)
    }


def test_the_store_s_pod_stands_wherever_its_volume_is() -> None:
    seen = climbing(Rung.SERVING, Rung.SERVING)
    assert seen.climb is not None
    seen = replace(seen, climb=replace(seen.climb, tally=FailureTally(avoids=("node-2",))))
    assert (CreatePod("rollout", 1),) == plan(changed(seen, 2, phase=PodPhase.FAILED, facts=None)).pods


def test_so_many_nodes_are_avoided_and_the_oldest_are_forgotten() -> None:
    rules = policy(rule("TrainerDied", action="ReplacePodElsewhere"))
    seen = dead(climbing(Rung.RELEASED, Rung.RELEASED, failure_policy=rules))
    assert seen.climb is not None
    older = tuple(f"old-{number}" for number in range(MAX_AVOIDED))
    seen = replace(seen, climb=replace(seen.climb, tally=FailureTally(avoids=older)))
    assert (*older[1:], "node-0") == climb_of(plan(seen)).tally.avoids
    assert 8 == MAX_AVOIDED


def test_the_first_to_die_is_at_fault_not_those_whose_collectives_it_broke() -> None:
    rules = policy(rule("TrainerDied", action="RestartPod"), backoff_s=10)
    seen = dead(climbing(Rung.RELEASED, Rung.RELEASED, failure_policy=rules), 1)
    seen = dead(dead(later(seen, 1), 0), 1)
    assert ["sums-gpu-1-0"] == gone(plan(later(seen, 9)))


def test_out_of_memory_is_distinguished_from_other_deaths_by_kubelet_s_word_of_these_trainers() -> None:
    rules = policy(rule("OutOfMemory", action="FailJob"))
    seen = climbing(Rung.RELEASED, Rung.RELEASED, failure_policy=rules)
    assert Cause.TRAINER_DIED is climb_of(plan(dead(seen))).cause
    killed = plan(dead(seen, memory_kills=1))
    assert Cause.FAILURE_POLICY is climb_of(killed).cause
    assert "OutOfMemory" == climb_of(killed).tally.cause
    long_ago = replace(changed(seen, 0, memory_kills=1), memory=replace(seen.memory, epoch=4, lineage=0))
    assert Cause.TRAINER_DIED is climb_of(plan(dead(remember(long_ago), memory_kills=1))).cause
    assert Cause.TRAINER_DIED is climb_of(plan(dead(remember(long_ago), memory_kills=0))).cause, (
        "its newest end was another"
    )


def test_a_container_that_was_ended_for_its_memory_is_at_fault_though_a_peer_was_seen_to_die_before_it() -> None:
    """Its agent learns of it when the container is back, and a peer's rank at once, by the connection that it lost."""
    seen = later(dead(climbing(Rung.RELEASED, Rung.RELEASED), 1), 1)
    failures = climb_of(plan(dead(seen, 0, memory_kills=1))).tally
    assert ("OutOfMemory", "") == (failures.cause, failures.pod)
    assert "a trainer died at step 2: sums-gpu-0-0 (" in plan(dead(seen, 0, memory_kills=1)).message


def test_an_end_for_memory_that_kubelet_told_of_before_the_next_step_began_explains_the_death_in_it() -> None:
    """The agent tells of the death when it has reached the container that was started again."""
    seen = climbing(Rung.RELEASED, Rung.RELEASED)
    assert seen.climb is not None
    before = replace(seen, climb=replace(seen.climb, epoch=4), memory=Memory())
    ended = changed(remember(before), 0, memory_kills=1)
    following_epoch = remember(replace(ended, climb=seen.climb))
    assert "OutOfMemory" == climb_of(plan(dead(following_epoch, 0, memory_kills=1))).tally.cause


def test_a_death_says_why_the_container_ended_unless_the_pod_reports_more() -> None:
    def said(**changes: Any) -> str:
        seen = dead(climbing(Rung.RELEASED, Rung.RELEASED), **changes)
        facts = seen.members[0].pod_facts
        assert facts is not None
        return plan(changed(seen, 0, facts=facts.model_copy(update={"problem": None}))).message

    assert said().startswith("a trainer died at step 2: sums-gpu-0-0 (it ended by itself): ")
    killed = "a trainer died at step 2: sums-gpu-0-0 (its container was ended for its memory): "
    assert said(memory_kills=1).startswith(killed)


@pytest.mark.parametrize("count", [9, 10, 11])
def test_a_message_names_ten_pods_and_of_each_problem_its_beginning(count: int) -> None:
    seen = climbing(*(Rung.RELEASED,) * count)
    for index in range(count):
        facts = dead(seen, index).members[index].pod_facts
        assert facts is not None
        problem = Problem(reason="TrainerDied", message=f"{'x' * 199}yz")
        seen = replace(seen, members=tuple(
            replace(member, facts=facts.model_copy(update={"problem": problem})) if place == index else member
            for place, member in enumerate(seen.members)
        ))  # fmt: skip
    message = plan(remember(seen)).message
    assert min(count, 10) == message.count(f" ({'x' * 199}y)")


@pytest.mark.parametrize(("count", "rest"), [(9, ""), (10, ""), (11, " and 1 more"), (13, " and 3 more")])
def test_a_list_names_ten_and_counts_the_rest(count: int, rest: str) -> None:
    words = [f"pod-{number}" for number in range(count)]
    assert f"{', '.join(words[:10])}{rest}" == listed(words)


# ----------------------------------------------------------------------------------------------------------- back-off
def test_a_retry_waits_for_twice_as_long_after_each_failure_in_a_row_up_to_the_maximum() -> None:
    seen = dead(climbing(Rung.RELEASED, Rung.RELEASED, failure_policy=policy(backoff_s=10, most_s=35)))
    assert seen.climb is not None
    for tries, wait_s in ((0, 10), (1, 20), (2, 35), (3, 35)):
        tried = replace(seen, climb=replace(seen.climb, tally=FailureTally(step=2, tries=tries)))
        waiting = plan(later(tried, wait_s - 1))
        assert not waiting.raises
        assert waiting.wait is not None
        assert Waiting.BACKOFF is waiting.wait.reason
        assert f"the trainers start together again, {wait_s} s later" in waiting.wait.message
        assert seen.now + wait_s == waiting.wake_at
        assert tries + 1 == climb_of(plan(later(tried, wait_s))).tally.tries


def test_without_a_policy_the_back_off_grows_from_ten_seconds_to_five_minutes() -> None:
    policy = ColocatedRLJobSpec.model_validate(
        {key: value for key, value in make_manifest()["spec"].items() if key != "failurePolicy"}
    ).failure_policy
    assert [10, 20, 40, 80, 160, 300, 300] == [policy.backoff_s(tries) for tries in range(7)]
    seen = dead(climbing(Rung.RELEASED, Rung.RELEASED, failure_policy={}))
    assert seen.now + 10 == plan(seen).wake_at
    assert Cause.TRAINER_DIED is climb_of(plan(later(seen, 10))).cause


def test_a_finished_step_ends_the_row() -> None:
    seen = dead(climbing(Rung.RELEASED, Rung.RELEASED, failure_policy=policy(backoff_s=10)))
    assert seen.climb is not None
    seen = replace(seen, climb=replace(seen.climb, tally=FailureTally(step_retries=4, step=1, tries=4)))
    climb = climb_of(plan(later(seen, 10)))
    assert (5, 2, 1) == (climb.tally.step_retries, climb.tally.step, climb.tally.tries)


def test_a_new_leader_raises_its_epoch_before_it_waits() -> None:
    seen = dead(climbing(Rung.RELEASED, Rung.RELEASED, failure_policy=policy(backoff_s=10)))
    seen = replace(seen, memory=replace(seen.memory, raised=False))
    assert Cause.TAKEOVER is climb_of(plan(seen)).cause


def test_what_is_exhausted_fails_at_once_and_says_what_to_do() -> None:
    seen = dead(climbing(Rung.RELEASED, Rung.RELEASED, failure_policy=policy(backoff_s=10), backoffLimit=3))
    assert seen.climb is not None
    used = replace(seen.climb, tally=FailureTally(pod_restarts=1, step_retries=2, counted=(1, 2, 2)))
    decided = plan(replace(seen, climb=used))
    assert Cause.BACKOFF_LIMIT is climb_of(decided).cause
    assert (
        "backoffLimit 3 is used up by 3 failures within 10 steps: read the pods' logs and fix what fails; to "
        "continue it: kubectl crlj retry -n default sums, or a backoffLimit above 3" in decided.message
    )


def test_what_a_rule_does_not_count_is_never_exhausted() -> None:
    rules = policy(rule("PodEvicted", action="RestartPod", counts=False))
    seen = climbing(Rung.SERVING, Rung.SERVING, failure_policy=rules, backoffLimit=0)
    climb = climb_of(plan(changed(seen, 0, phase=PodPhase.FAILED, facts=None, fate=FailureCause.POD_EVICTED)))
    assert (0, 1, "") == (climb.restarts, climb.tally.pod_restarts, climb.group)


def test_a_limit_that_was_lowered_below_what_is_used_ends_the_job_with_the_next_failure() -> None:
    seen = dead(climbing(Rung.RELEASED, Rung.RELEASED, backoffLimit=1))
    assert seen.climb is not None
    used = replace(seen, climb=replace(seen.climb, tally=FailureTally(counted=(2, 2, 2))))
    assert Cause.BACKOFF_LIMIT is climb_of(plan(used)).cause


def test_a_rule_with_tries_makes_way_for_the_next() -> None:
    rules = policy(rule("TrainerDied", action="RetryStep", maxTries=2), rule("TrainerDied", action="FailJob"))
    seen = dead(climbing(Rung.RELEASED, Rung.RELEASED, failure_policy=rules))
    assert seen.climb is not None
    retried, failed = Cause.TRAINER_DIED, Cause.FAILURE_POLICY
    for tries, cause in ((0, retried), (1, retried), (2, failed), (3, failed)):
        tried = replace(seen, climb=replace(seen.climb, tally=FailureTally(step=2, tries=tries)))
        assert cause is climb_of(plan(tried)).cause


# -------------------------------------------------------------------------------------------------- twice in one pod
def died_before(pod: str, *, died: int = 1, tries: int = 1, pods: int = 2, **changes: Any) -> Plan:
    """The plan for a death in that pod, when the last one at a step began in `pod`."""
    seen = climbing(*(Rung.RELEASED,) * pods, failure_policy=changes.pop("failure_policy", policy()))
    seen = dead(seen, died, **changes)
    assert seen.climb is not None
    return plan(replace(seen, climb=replace(seen.climb, tally=FailureTally(step=2, tries=tries, pod=pod))))


def test_a_pod_in_which_two_deaths_of_a_step_began_is_made_again_elsewhere() -> None:
    """A device that broke at each step cost the job its backoffLimit: trainers started in the same pod each time."""
    decided = died_before("sums-gpu-1-0")
    climb = climb_of(decided)
    assert (["sums-gpu-1-0"], ("node-1",), "") == (gone(decided), climb.tally.avoids, climb.group)
    assert (1, "ReplacePodElsewhere", None) == (climb.restarts, climb.tally.action, climb.tally.rule)
    assert decided.message.endswith("sums-gpu-1-0 recreated, not on node-1")


@pytest.mark.parametrize(
    ("pod", "deaths"),
    [
        ("sums-gpu-0-0", {}),
        ("sums-gpu-1-0", {"died": 0}),
        ("sums-gpu-1-1", {}),
        ("", {}),
        ("sums-gpu-1-0", {"tries": 0}),
        ("sums-gpu-1-0", {"memory_kills": 1}),
        ("sums-gpu-0-0", {"died": 0, "pods": 1}),
        ("sums-gpu-1-0", {"failure_policy": policy(rule("TrainerDied", action="RetryStep"))}),
    ],
    ids=["another", "one before", "its successor", "unknown", "another step", "memory", "the only pod", "a rule"],
)
def test_what_is_no_second_death_in_one_pod_of_several_is_retried_where_it_was(
    pod: str, deaths: dict[str, Any]
) -> None:
    decided = died_before(pod, **deaths)
    assert ([], "RetryStep") == (gone(decided), climb_of(decided).tally.action)


def test_deaths_that_begin_in_two_pods_at_once_are_the_fault_of_neither() -> None:
    seen = dead(climbing(Rung.RELEASED, Rung.RELEASED), 0)
    facts = seen.members[0].pod_facts
    members = tuple(replace(each, facts=facts) if each.seat == "gpu-1" else each for each in seen.members)
    both = remember(replace(seen, members=members, memory=replace(seen.memory, died=frozenset(), died_at=None)))
    assert "" == climb_of(plan(both)).tally.pod


# ----------------------------------------------------------------------------------------------------------- roll back
ROLL_BACK = policy(rule("TrainerDied", "RungDeadlineExceeded", action="RollBack"), backoff_s=20)


def test_a_step_that_is_not_finished_is_rolled_back_to_the_one_before_at_once() -> None:
    decided = plan(dead(climbing(Rung.RELEASED, Rung.RELEASED, failure_policy=ROLL_BACK)))
    climb = climb_of(decided)
    assert (1, 2, Cause.TRAINER_DIED) == (climb.step, climb.lineage, climb.cause)
    assert (2, 1) == (climb.tally.step, climb.tally.tries)
    assert "back to step 1" in decided.message


@pytest.mark.parametrize("known", ["facts", "status", "store"])
def test_a_step_that_anybody_knows_to_be_finished_is_not_taken_back(known: str) -> None:
    rungs = (Rung.TRAINED, Rung.TRAINED) if known == "facts" else (Rung.RELEASED, Rung.RELEASED)
    seen = climbing(*rungs, failure_policy=ROLL_BACK)
    if known == "status":
        seen = replace(seen, trained_step=2)
    if known == "store":
        seen = changed(seen, 2, facts=rollout_facts(sealed=2, trained=2, epoch=5))
    if known == "facts":
        seen = later(seen, patience_s(TIME_SLICED, Rung.EXPORTED, seen.job.spec.switch))
    climb = climb_of(plan(seen if known == "facts" else dead(seen)))
    assert (2, 2) == (climb.step, climb.lineage)


def test_a_step_whose_former_nobody_reports_is_rolled_back_to_that() -> None:
    seen = replace(climbing(Rung.RELEASED, Rung.RELEASED, failure_policy=ROLL_BACK), trained_step=0)
    climb = climb_of(plan(dead(changed(seen, 2, facts=rollout_facts(sealed=2, trained=0, epoch=5)))))
    assert (1, 2) == (climb.step, climb.lineage)


def test_rollout_goes_on_before_a_rolled_back_step_is_tried_again() -> None:
    job = make_job(failurePolicy=ROLL_BACK)
    climb = replace(
        make_climb(1, 2, epoch=6, cause=Cause.TRAINER_DIED),
        tally=FailureTally(step_retries=1, step=2, tries=1, cause="TrainerDied", action="RollBack", rule=0),
    )
    pods: list[PodFacts | None] = [facts_at(Rung.SERVING, WeightVersion(1, 2), epoch=6)] * 2
    seen = make_observation(job, pods, climb=climb, rollout=rollout_facts(sealed=2, trained=1), trained_step=1)
    waiting = plan(later(seen, 19))
    assert not waiting.raises
    assert waiting.wait is not None
    assert "step 2 failed 1 time: rollout continues before it is retried" == waiting.wait.message
    for after_s in (20, 21):
        again = climb_of(plan(later(seen, after_s)))
        assert (2, 2, Cause.NEXT_STEP) == (again.step, again.lineage, again.cause)
        assert 1 == again.tally.tries_at(2)


@pytest.mark.parametrize("ruled", [True, False], ids=["by-a-rule", "without-a-rule"])
def test_a_pod_made_again_while_a_rolled_back_step_waits_does_not_end_its_back_off(*, ruled: bool) -> None:
    """It did: the answer to the pod's loss stood where the roll-back had, which nobody then knew of."""
    rules = [rule("TrainerDied", action="RollBack"), *([rule("PodFailed", action="RestartPod")] * ruled)]
    seen = dead(climbing(Rung.RELEASED, Rung.RELEASED, failure_policy=policy(*rules, backoff_s=20)))
    back = following(seen, plan(seen))
    lost = changed(back, 1, phase=PodPhase.FAILED, fate=FailureCause.POD_FAILED, facts=None)
    lost = following(lost, plan(lost)) if ruled else lost
    again = make_member("gpu-1", 1, facts=back.members[0].facts)
    whole = remember(replace(lost, members=(lost.members[0], again, lost.members[2])))
    climb = climb_of(plan(whole))
    assert (1, Cause.POD_REPLACED, "RestartPod") == (climb.step, climb.cause, climb.tally.action)
    serving = facts_at(Rung.SERVING, climb.version, epoch=climb.epoch)
    facts = rollout_facts(sealed=2, trained=1, epoch=climb.epoch)
    members = (*(replace(each, facts=serving) for each in whole.members[:2]), replace(whole.members[2], facts=facts))
    up = remember(replace(following(whole, plan(whole)), members=members))
    assert not plan(up).raises
    assert Waiting.BACKOFF is getattr(plan(up).wait, "reason", None)
    assert (2, Cause.NEXT_STEP) == (climb_of(plan(later(up, 40))).step, climb_of(plan(later(up, 40))).cause)


def test_the_first_climb_has_nothing_to_go_back_to() -> None:
    job = make_job(failurePolicy=ROLL_BACK)
    pods: list[PodFacts | None] = [facts_at(Rung.RELEASED, WeightVersion(0, 1), epoch=1)] * 2
    seen = make_observation(job, pods, climb=make_climb(0), rollout=rollout_facts())
    assert 0 == climb_of(plan(dead(seen))).step


# ------------------------------------------------------------------------------------------------ of a rung's deadline
def stuck(*rungs: Rung, failure_policy: dict[str, Any]) -> Observation:
    seen = climbing(*rungs, failure_policy=failure_policy)
    barrier = TIME_SLICED.next_barrier(seen.slowest)
    return later(seen, patience_s(TIME_SLICED, barrier, seen.job.spec.switch))


def test_a_rule_may_be_for_some_rungs() -> None:
    rules = policy(rule("RungDeadlineExceeded", action="FailJob", atRungs=["Released"]))
    assert Cause.FAILURE_POLICY is climb_of(plan(stuck(Rung.RELEASED, Rung.RELEASED, failure_policy=rules))).cause
    assert Cause.RUNG_DEADLINE is climb_of(plan(stuck(Rung.PAUSED, Rung.PAUSED, failure_policy=rules))).cause


def test_the_pods_that_stand_lowest_are_at_fault() -> None:
    rules = policy(rule("RungDeadlineExceeded", action="RestartPod"))
    assert ["sums-gpu-1-0"] == gone(plan(stuck(Rung.TRAINED, Rung.RELEASED, failure_policy=rules)))
    two = plan(stuck(Rung.TRAINED, Rung.RELEASED, Rung.RELEASED, failure_policy=rules))
    assert ["sums-gpu-1-0", "sums-gpu-2-0"] == gone(two)
    assert ["sums-gpu-0-0"] == gone(plan(stuck(Rung.RELEASED, failure_policy=rules))), "nobody else is there"


def test_a_group_that_stands_still_together_loses_no_pod_but_those_that_report_a_problem() -> None:
    rules = policy(rule("RungDeadlineExceeded", action="ReplacePodElsewhere"))
    seen = stuck(Rung.RELEASED, Rung.RELEASED, failure_policy=rules)
    together = plan(seen)
    assert [] == gone(together)
    assert (1, 0, ()) == (
        climb_of(together).tally.step_retries,
        climb_of(together).tally.pod_restarts,
        climb_of(together).tally.avoids,
    )
    facts = seen.members[1].pod_facts
    assert facts is not None
    hung = facts.model_copy(update={"problem": Problem(reason="TrainerFailed", message="no answer")})
    assert ["sums-gpu-1-0"] == gone(plan(changed(seen, 1, facts=hung)))
    assert [] == gone(plan(changed(changed(seen, 1, facts=hung), 0, facts=hung))), "all of them do"
    waits = facts.model_copy(update={"problem": Problem(reason="BatchUnavailable", message="no route")})
    for reason in ("StateNotMirrored", "SlowNetwork"):  # they hold up nobody
        other = facts.model_copy(update={"problem": Problem(reason=reason, message="no space left")})
        assert ["sums-gpu-1-0"] == gone(plan(changed(changed(seen, 1, facts=waits), 0, facts=other))), reason


def differing(failure_policy: dict[str, Any] | None) -> Observation:
    seen = climbing(Rung.UPDATED, Rung.UPDATED, failure_policy=failure_policy)
    for index in range(2):
        facts = seen.members[index].pod_facts
        assert facts is not None
        engine = facts.engines[0].model_copy(update={"checksum": f"sum {index}"})
        seen = changed(seen, index, facts=facts.model_copy(update={"engines": (engine,)}))
    return seen


def stalled(seen: Observation, *moved: int | None) -> Observation:
    """Return what is seen when each pod's trainer stands still after so much of the step; None: it goes on."""
    for place, done in enumerate(moved):
        facts = seen.members[place].pod_facts
        assert facts is not None
        ranks = tuple(rank.model_copy(update={"stalled": done}) for rank in facts.trainers)
        problem = Problem(reason="TrainerStalled", message=f"rank {place} is in all_reduce (group.py:7)")
        seen = changed(seen, place, facts=facts.model_copy(update={"trainers": ranks, "problem": problem}))
    return seen


def test_a_step_in_which_no_rank_gets_on_is_tried_again_long_before_its_deadline() -> None:
    """It took half an hour, and the message named nobody."""
    seen = later(climbing(Rung.RELEASED, Rung.RELEASED, Rung.RELEASED, failure_policy=policy()), 60)
    decided = plan(stalled(seen, 5, 3, 5))
    climb = climb_of(decided)
    assert (Cause.RUNG_DEADLINE, 2, "RetryStep", "sums-gpu-1-0") == (
        *(climb.cause, climb.lineage, climb.tally.action, climb.tally.pod),
    )
    assert (
        "no trainer gets on with step 2; furthest behind: sums-gpu-1-0 (rank 1 is in all_reduce (group.py:7)): the "
        "trainers start together again" == decided.message
    )


def test_a_pod_that_is_furthest_behind_is_replaced_where_a_rule_says_so_and_nobody_if_all_are() -> None:
    rules = policy(rule("RungDeadlineExceeded", action="ReplacePodElsewhere"))
    seen = climbing(Rung.RELEASED, Rung.RELEASED, failure_policy=rules)
    assert ["sums-gpu-1-0"] == gone(plan(stalled(seen, 5, 3)))
    together = plan(stalled(seen, 3, 3))
    assert ([], "") == (gone(together), climb_of(together).tally.pod)


@pytest.mark.parametrize("moved", [(5, None), (None, None)])
def test_a_step_in_which_a_rank_gets_on_has_until_its_deadline(moved: tuple[int | None, ...]) -> None:
    assert not plan(stalled(climbing(Rung.RELEASED, Rung.RELEASED, failure_policy=policy()), *moved)).raises


def test_a_step_that_stalls_is_tried_again_after_its_back_off_from_when_it_stood_still() -> None:
    seen = stalled(climbing(Rung.RELEASED, Rung.RELEASED, failure_policy=policy(backoff_s=30)), 3, 3)
    assert not plan(seen).raises
    assert Cause.RUNG_DEADLINE is climb_of(plan(later(seen, 30))).cause


@pytest.mark.parametrize("backoff_s", [0, 30])
def test_ranks_that_stalled_are_not_counted_again_while_they_end(backoff_s: int) -> None:
    """Each look raised another epoch if there is no back-off: a hung collective used up backoffLimit in a second."""
    seen = stalled(climbing(Rung.RELEASED, Rung.RELEASED, failure_policy=policy(backoff_s=backoff_s)), 3, 3)
    seen = later(seen, backoff_s)
    climb = climb_of(plan(seen))
    assert (Cause.RUNG_DEADLINE, 1) == (climb.cause, climb.restarts)
    decided = plan(remember(seen.following(climb)))
    assert (False, None) == (decided.raises, decided.wait)


def test_engines_that_hold_different_weights_are_answered_at_once_because_they_would_serve() -> None:
    climb = climb_of(plan(differing(failure_policy=policy(backoff_s=10))))
    assert (Cause.WEIGHTS_DIFFER, 1, "WeightsDiffer") == (climb.cause, climb.tally.step_retries, climb.tally.cause)


# ---------------------------------------------------------------------------------------------- of engines and of pods
def engine_lost(seen: Observation, index: int, failures: int) -> Observation:
    facts = seen.members[index].pod_facts
    assert facts is not None
    engine = facts.engines[0].model_copy(update={"failures": failures})
    return changed(seen, index, facts=facts.model_copy(update={"engines": (engine,)}))


def test_a_lost_engine_is_the_agent_s_business_until_a_rule_says_otherwise() -> None:
    rules = policy(
        rule("EngineLost", action="RestartEngine", maxTries=2), rule("EngineLost", action="ReplacePodElsewhere")
    )
    seen = climbing(Rung.OFFLOADED, Rung.SERVING, failure_policy=rules)
    assert not plan(engine_lost(seen, 0, 2)).raises
    decided = plan(engine_lost(seen, 0, 3))
    assert (["sums-gpu-0-0"], ("node-0",)) == (gone(decided), climb_of(decided).tally.avoids)
    assert "was lost, 3 times since it last served" in decided.message
    seldom = policy(rule("EngineLost", action="ReplacePodElsewhere"))
    for failures, often in ((1, "was lost: "), (2, "was lost, 2 times since it last served: ")):
        lost = engine_lost(climbing(Rung.OFFLOADED, Rung.SERVING, failure_policy=seldom), 0, failures)
        assert often in plan(lost).message
    assert not plan(changed(lost, 1, facts=None)).raises, "a pod that does not answer now may tell of more"
    assert not plan(engine_lost(climbing(Rung.OFFLOADED, Rung.SERVING), 0, 30)).raises


def test_a_container_that_was_ended_for_its_memory_is_answered_as_that_and_not_as_its_engines_loss() -> None:
    """Engine and trainer end with it, and the engine's rule took the pod."""
    rules = policy(rule("EngineLost", action="ReplacePodElsewhere"), rule("OutOfMemory", action="FailJob"))
    seen = climbing(Rung.RELEASED, Rung.RELEASED, failure_policy=rules)
    killed = climb_of(plan(dead(engine_lost(seen, 0, 1), memory_kills=1)))
    assert (Cause.FAILURE_POLICY, "OutOfMemory") == (killed.cause, killed.tally.cause)
    other = climb_of(plan(dead(engine_lost(seen, 0, 1), 1)))
    assert "EngineLost" == other.tally.cause, "in another pod than that whose trainer died"


LOST: list[tuple[FailureCause, dict[str, Any]]] = [
    (FailureCause.POD_EVICTED, {"fate": FailureCause.POD_EVICTED, "ends_at": 160.0}),
    (FailureCause.POD_FAILED, {"fate": FailureCause.POD_FAILED, "phase": PodPhase.FAILED}),
    (FailureCause.MEMBER_SILENT, {"silent_since": 100.0 - SILENCE_S}),
]


def test_a_pod_with_a_bad_device_is_made_again_elsewhere_at_once_and_costs_nothing() -> None:
    seen = changed(climbing(Rung.SERVING, Rung.SERVING), 1, ill_device="nvidia.com/gpu GPU-1 is Unhealthy: XID 79")
    decided = plan(seen)
    climb = climb_of(decided)
    assert (["sums-gpu-1-0"], ("node-1",), 0) == (gone(decided), climb.tally.avoids, climb.restarts)
    assert (
        "a device of pod sums-gpu-1-0 is bad (nvidia.com/gpu GPU-1 is Unhealthy: XID 79): sums-gpu-1-0 recreated, not "
        "on node-1, which does not count against backoffLimit" == decided.message
    )
    assert not plan(following(seen, decided)).raises, "it is answered once"


def test_a_pod_whose_agent_reads_a_bad_device_is_made_again_elsewhere_at_once() -> None:
    seen = climbing(Rung.TRAINED, Rung.TRAINED)
    pod = seen.members[1]
    assert pod.pod_facts is not None
    facts = pod.pod_facts.model_copy(update={"bad_device": "device 3: it has fallen off the bus"})
    decided = plan(changed(seen, 1, facts=facts))
    assert (["sums-gpu-1-0"], ("node-1",)) == (gone(decided), climb_of(decided).tally.avoids)
    assert "sums-gpu-1-0 is bad (device 3: it has fallen off the bus)" in decided.message
    assert 0 == climb_of(decided).restarts


def test_the_node_of_a_bad_device_is_tainted_once_its_pod_is_made_elsewhere() -> None:
    """The taint is asked for as long as the pod is there, since the API server may be away."""
    ill = {"ill_device": "nvidia.com/gpu GPU-1 is Unhealthy"}
    seen = changed(climbing(Rung.SERVING, Rung.SERVING), 1, **ill)
    decided = plan(seen)
    asked = (TaintNode("node-1", seen.members[1].uid),)
    assert asked == decided.taints
    assert asked == plan(following(seen, decided)).taints
    assert () == plan(replace(following(seen, decided), members=seen.members[:1])).taints


@pytest.mark.parametrize(
    ("action", "signs"),
    [
        ("RestartPod", {"ill_device": "GPU-1"}),
        ("FailJob", {"ill_device": "GPU-1"}),
        ("ReplacePodElsewhere", {"fate": FailureCause.POD_EVICTED, "ends_at": 160.0}),
    ],
)
def test_no_other_node_is_tainted(action: str, signs: dict[str, Any]) -> None:
    rules = policy(rule("BadDevice", "PodEvicted", action=action))
    decided = plan(changed(climbing(Rung.SERVING, Rung.SERVING, failure_policy=rules), 1, **signs))
    assert decided.raises
    assert () == decided.taints


@pytest.mark.parametrize("begins", [False, True], ids=["avoided already", "from now on"])
def test_a_pod_that_has_ended_taints_its_node_only_when_that_begins_to_be_avoided(begins: bool) -> None:
    """It is kept for its logs. A person has mended the node since, and a new operator tainted it again."""
    seen = changed(climbing(Rung.SERVING, Rung.SERVING), 1, node="node-2")
    ended = {"phase": PodPhase.FAILED, "fate": FailureCause.BAD_DEVICE, "ill_device": "GPU-1", "address": None}
    former = make_member("gpu-1", 0, node="node-1", **ended)
    seen = remember(replace(seen, members=(*seen.members, replace(former, uid=PodUid("former")))))
    assert seen.climb is not None
    avoids = replace(seen.climb, tally=replace(seen.climb.tally, avoids=("node-1",), cause="BadDevice"))
    asked = taints(seen if begins else replace(seen, climb=avoids), avoids)
    assert ([TaintNode("node-1", PodUid("former"))] if begins else []) == [*asked]


def test_all_pods_of_a_lost_rack_are_made_elsewhere_and_none_on_a_node_of_another() -> None:
    """All but the first were deleted without a word of where they had been, and could come back there."""
    seen = climbing(Rung.SERVING, Rung.SERVING, Rung.SERVING)
    for index in (1, 2):
        seen = changed(seen, index, facts=None, silent_since=100.0 - SILENCE_S)
    decided = plan(seen)
    assert (Cause.POD_REPLACED, "MemberSilent") == (climb_of(decided).cause, climb_of(decided).tally.cause)
    assert {"node-1", "node-2"} == {*climb_of(decided).tally.avoids}
    assert ["sums-gpu-1-0", "sums-gpu-2-0"] == gone(decided)
    for name in ("sums-gpu-1-0", "sums-gpu-2-0"):
        assert f"no answer from pod {name} for {SILENCE_S:.0f} s" in decided.message


def test_a_pod_that_came_back_to_its_bad_device_is_left_there() -> None:
    """No other node had room. It was made again for ever, and nothing counted; its trainers' deaths count."""
    seen = changed(climbing(Rung.SERVING, Rung.SERVING), 1, ill_device="gpu 1")
    decided = plan(seen)
    seen = following(seen, decided)
    again = make_member("gpu-1", 1, node="node-1", facts=seen.members[0].facts, ill_device="gpu 1")
    seen = replace(seen, climb=replace(climb_of(decided), group="of others"), members=(*seen.members[:1], again))
    assert [] == gone(plan(remember(seen)))
    assert ["sums-gpu-1-1"] == gone(plan(changed(seen, 1, node="another")))
    first = replace(seen, members=(*seen.members[:1], replace(again, attempt=0)))
    assert [again.name] == gone(plan(remember(first))), "it was there before the job avoided the node for another pod"


@pytest.mark.parametrize("cause", ["MemberSilent", "PodEvicted", ""], ids=["silent", "evicted", "nobody knows why"])
def test_a_bad_device_on_a_node_that_was_left_for_something_else_is_left_for_another(cause: str) -> None:
    """The node is back, and its pod: it has not come back to a bad device."""
    seen = changed(climbing(Rung.SERVING, Rung.SERVING), 1, facts=None, silent_since=100.0 - SILENCE_S)
    decided = plan(seen)
    climb = climb_of(decided)
    assert ("node-1",) == climb.tally.avoids
    again = make_member("gpu-1", 1, node="node-1", facts=seen.members[0].facts, ill_device="gpu 1")
    after = replace(following(seen, decided), members=(seen.members[0], again, seen.members[2]))
    left = replace(climb, group=after.group or "", tally=replace(climb.tally, cause=cause))
    after = remember(replace(after, climb=left))
    assert ["sums-gpu-1-1"] == gone(plan(after))


def test_a_pod_that_its_node_ended_for_a_bad_device_is_made_again_elsewhere() -> None:
    ended = {"fate": FailureCause.BAD_DEVICE, "phase": PodPhase.FAILED, "facts": None, "ill_device": "GPU-1"}
    decided = plan(changed(climbing(Rung.SERVING, Rung.SERVING), 1, **ended))
    assert [("node-1",)] == [each.avoids for each in decided.pods if isinstance(each, CreatePod)]
    assert 0 == climb_of(decided).restarts


def test_a_rule_may_answer_a_bad_device() -> None:
    rules = policy(rule("BadDevice", action="FailJob"))
    seen = climbing(Rung.SERVING, Rung.SERVING, failure_policy=rules)
    assert Cause.FAILURE_POLICY is climb_of(plan(changed(seen, 1, ill_device="GPU-1"))).cause


@pytest.mark.parametrize(("cause", "signs"), LOST, ids=lambda value: str(value) if isinstance(value, str) else None)
def test_a_lost_pod_is_answered_by_its_rule(cause: FailureCause, signs: dict[str, Any]) -> None:
    def lose(action: str | None, seat: int = 1) -> Plan:
        rules = policy(rule(cause, action=action)) if action else None
        seen = climbing(Rung.SERVING, Rung.SERVING, failure_policy=rules)
        return plan(changed(seen, seat, facts=None, **signs))

    usual, elsewhere = lose(None), lose("ReplacePodElsewhere")
    is_silent = cause is FailureCause.MEMBER_SILENT
    assert is_silent is usual.raises, "its node may be lost, and is avoided; the others are left to the roster"
    said = {FailureCause.MEMBER_SILENT: f"no answer from pod sums-gpu-1-0 for {SILENCE_S:.0f} s"}
    assert elsewhere.message.startswith(said.get(cause, f"pod sums-gpu-1-0 is lost ({cause}): "))
    climb = climb_of(elsewhere)
    restarts = int(cause.counts)
    assert (("node-1",), "", restarts, str(cause)) == (
        *(climb.tally.avoids, climb.group, climb.restarts, climb.tally.cause),
    )
    assert len(usual.pods) == len(elsewhere.pods) == 1
    made = [each.avoids for each in elsewhere.pods if isinstance(each, CreatePod)]
    assert made == ([] if is_silent else [("node-1",)])
    assert Cause.FAILURE_POLICY is climb_of(lose("FailJob")).cause
    assert not lose("FailJob", seat=2).raises, "the rollout controller's pod has no rules"


def test_a_loss_without_a_rule_keeps_no_other_from_its_own() -> None:
    seen = climbing(Rung.SERVING, Rung.SERVING, failure_policy=policy(rule("PodEvicted", action="FailJob")))
    seen = changed(seen, 0, facts=None, fate=FailureCause.POD_FAILED, phase=PodPhase.FAILED)
    seen = changed(seen, 1, facts=None, fate=FailureCause.POD_EVICTED, ends_at=160.0)
    assert Cause.FAILURE_POLICY is climb_of(plan(seen)).cause


def test_a_lost_pod_is_told_of_with_its_trouble_where_that_is_known() -> None:
    seen = climbing(Rung.SERVING, Rung.SERVING, failure_policy=policy(rule("PodFailed", action="FailJob")))
    lost = {"fate": FailureCause.POD_FAILED, "phase": PodPhase.FAILED, "trouble": "container gpu ended with code 3"}
    decided = plan(changed(seen, 1, facts=None, **lost))
    assert decided.message.startswith("pod sums-gpu-1-0 is lost (container gpu ended with code 3): ")


def test_a_pod_that_somebody_deleted_is_no_failure_for_a_rule() -> None:
    rules = policy(rule("PodEvicted", "PodFailed", "MemberSilent", action="FailJob"))
    seen = climbing(Rung.SERVING, Rung.SERVING, failure_policy=rules)
    decided = plan(changed(seen, 1, facts=None, ends_at=160.0))
    assert not decided.raises
    assert (CreatePod("gpu-1", 1),) == decided.pods


def test_a_second_loss_while_the_first_is_made_good_costs_no_second_restart() -> None:
    rules = policy(rule("PodEvicted", action="ReplacePodElsewhere", counts=True))
    seen = climbing(Rung.SERVING, Rung.SERVING, failure_policy=rules)
    evicted = {"fate": FailureCause.POD_EVICTED, "ends_at": 160.0, "facts": None}
    seen = changed(seen, 0, **evicted)
    seen = following(seen, plan(seen))
    assert not plan(seen).raises
    seen = changed(seen, 1, **evicted)
    climb = climb_of(plan(seen))
    assert (1, 1, ("node-0", "node-1")) == (climb.restarts, climb.tally.pod_restarts, climb.tally.avoids)


def test_a_rule_is_not_asked_while_a_group_forms_unless_it_ends_the_job() -> None:
    """Its pods are being made anew for another loss already."""
    rules = policy(rule("PodEvicted", action="RestartPod"), rule("PodFailed", action="FailJob"))
    seen = climbing(Rung.SERVING, Rung.SERVING, failure_policy=rules)
    evicted = {"fate": FailureCause.POD_EVICTED, "ends_at": 160.0, "facts": None}
    seen = changed(seen, 0, **evicted)
    forming = following(seen, plan(seen))
    assert not plan(changed(forming, 1, **evicted)).raises
    failed = {"fate": FailureCause.POD_FAILED, "phase": PodPhase.FAILED, "facts": None}
    assert Cause.FAILURE_POLICY is climb_of(plan(changed(forming, 1, **failed))).cause


def test_a_loss_is_asked_of_the_rules_once_however_long_its_seat_is_empty() -> None:
    """The second look at one loss was its second try, and the next rule's."""
    rules = policy(rule("PodEvicted", action="RestartPod", maxTries=1), rule("PodEvicted", action="FailJob"))
    seen = climbing(Rung.SERVING, Rung.SERVING, failure_policy=rules)
    evicted = {"fate": FailureCause.POD_EVICTED, "ends_at": 160.0, "facts": None, "created_at": 99.5}
    seen = changed(seen, 0, **evicted)
    first = plan(seen)
    assert Cause.POD_REPLACED is climb_of(first).cause
    seen = following(seen, first)
    assert "gpu-0" not in seen.current
    assert not plan(seen).raises
    assert Cause.FAILURE_POLICY is climb_of(plan(changed(seen, 1, **evicted))).cause


def test_a_new_leader_asks_the_rules_of_what_was_lost_while_nobody_led() -> None:
    seen = climbing(Rung.SERVING, Rung.SERVING, failure_policy=policy(rule("PodEvicted", action="FailJob")))
    lost = changed(replace(seen, memory=Memory()), 0, fate=FailureCause.POD_EVICTED, ends_at=160.0, facts=None)
    assert Cause.FAILURE_POLICY is climb_of(plan(lost)).cause


def refilled(seen: Observation, index: int = 1, *, is_gone: bool = False) -> Observation:
    """There is another pod in the seat of that one, of which nothing is left if it is gone."""
    lost: Member = seen.members[index]
    fresh = make_member(lost.seat, lost.attempt + 1, facts=facts_at(Rung.RELEASED, V2, epoch=0))
    left = () if is_gone else (lost,)
    return remember(replace(seen, members=(*seen.members[:index], *left, fresh, *seen.members[index + 1 :])))


TAKEN_AWAY: dict[str, dict[str, Any]] = {
    "drained": {"fate": FailureCause.POD_EVICTED, "ends_at": 160.0},
    "ended by its node": {"fate": FailureCause.POD_EVICTED, "phase": PodPhase.FAILED},
    "deleted by somebody, or by the operator for its silence": {"ends_at": 160.0},
}


@pytest.mark.parametrize("is_gone", [False, True], ids=["still there", "gone"])
@pytest.mark.parametrize("signs", TAKEN_AWAY.values(), ids=TAKEN_AWAY)
def test_a_pod_that_was_taken_away_costs_no_restart_and_brings_no_rule_nearer(
    signs: dict[str, Any], is_gone: bool
) -> None:
    seen = climbing(Rung.SERVING, Rung.SERVING, backoffLimit=0)
    decided = plan(refilled(changed(seen, 1, facts=None, **signs), is_gone=is_gone))
    climb = climb_of(decided)
    assert (Cause.POD_REPLACED, 2, 0) == (climb.cause, climb.lineage, climb.restarts)
    assert FailureTally(pod_restarts=1, cause=signs.get("fate", ""), action="RestartPod") == climb.tally
    assert decided.message.endswith("the trainers start together again, which does not count against backoffLimit")


@pytest.mark.parametrize("is_gone", [False, True], ids=["still there", "deleted since"])
def test_a_pod_that_failed_by_itself_is_counted_when_the_group_is_whole_again(is_gone: bool) -> None:
    seen = climbing(Rung.SERVING, Rung.SERVING, backoffLimit=1)
    seen = changed(seen, 1, phase=PodPhase.FAILED, facts=None, fate=FailureCause.POD_FAILED)
    decided = plan(refilled(changed(seen, 1, fate=None, ends_at=160.0) if is_gone else seen, is_gone=is_gone))
    climb = climb_of(decided)
    assert (1, 1, 0) == (climb.restarts, climb.tally.pod_restarts, climb.tally.step_retries)
    assert ("PodFailed", "RestartPod", 2, 1) == (
        *(climb.tally.cause, climb.tally.action, climb.tally.step, climb.tally.tries),
    )
    assert decided.message.endswith("together again")


def test_of_two_lost_pods_the_one_that_failed_by_itself_counts() -> None:
    seen = changed(climbing(Rung.SERVING, Rung.SERVING), 0, facts=None, **TAKEN_AWAY["drained"])
    seen = changed(seen, 1, facts=None, phase=PodPhase.FAILED, fate=FailureCause.POD_FAILED)
    climb = climb_of(plan(refilled(refilled(seen, 1), 0)))
    assert (1, 1, "PodFailed") == (climb.restarts, climb.tally.pod_restarts, climb.tally.cause)


def test_of_two_pods_that_were_taken_away_the_first_names_the_cause() -> None:
    seen = changed(climbing(Rung.SERVING, Rung.SERVING), 0, facts=None, **TAKEN_AWAY["drained"])
    seen = changed(seen, 1, facts=None, fate=FailureCause.BAD_DEVICE, ends_at=160.0)
    climb = climb_of(plan(refilled(refilled(seen, 1), 0)))
    assert (0, "PodEvicted") == (climb.restarts, climb.tally.cause)


def test_a_pod_that_is_gone_is_named_with_how_it_went() -> None:
    for signs, words in (({"ends_at": 160.0}, "deleted"), ({"phase": PodPhase.FAILED}, "Failed")):
        seen = changed(climbing(Rung.SERVING, Rung.SERVING), 1, facts=None, **signs)
        assert plan(refilled(seen)).message.startswith(f"replaced: sums-gpu-1-0 ({words}): ")


def test_what_failed_before_the_group_was_formed_is_no_failure_of_it() -> None:
    """A pod that has failed stays for its log, and was counted once."""
    seen = climbing(Rung.SERVING, Rung.SERVING)
    older = make_member("gpu-0", -1, phase=PodPhase.FAILED, fate=FailureCause.POD_FAILED)
    seen = remember(replace(seen, members=(*seen.members, older)))
    climb = climb_of(plan(refilled(changed(seen, 1, facts=None, **TAKEN_AWAY["drained"]))))
    assert (0, "PodEvicted") == (climb.restarts, climb.tally.cause)


def test_a_failure_that_turns_out_to_be_an_eviction_does_not_count() -> None:
    """The node's word of how the pod ended may come before the reason."""
    seen = changed(climbing(Rung.SERVING, Rung.SERVING), 1, facts=None, phase=PodPhase.FAILED)
    failed = changed(seen, 1, fate=FailureCause.POD_FAILED)
    assert 0 == climb_of(plan(refilled(changed(failed, 1, fate=FailureCause.POD_EVICTED)))).restarts


def test_a_new_leader_counts_nothing_that_it_did_not_see() -> None:
    seen = changed(climbing(Rung.SERVING, Rung.SERVING), 1, facts=None, **TAKEN_AWAY["drained"])
    climb = climb_of(plan(refilled(replace(seen, memory=Memory()), is_gone=True)))
    assert (Cause.POD_REPLACED, 0) == (climb.cause, climb.restarts)


def test_what_does_not_count_ends_no_job_whose_limit_was_lowered_below_what_it_has_used() -> None:
    seen = climbing(Rung.SERVING, Rung.SERVING, backoffLimit=1)
    assert seen.climb is not None
    seen = replace(seen, climb=replace(seen.climb, tally=FailureTally(counted=(2, 2, 2))))
    climb = climb_of(plan(refilled(changed(seen, 1, facts=None, **TAKEN_AWAY["drained"]))))
    assert (Cause.POD_REPLACED, 3) == (climb.cause, climb.restarts)


def test_the_end_says_which_restarts_did_not_count() -> None:
    seen = dead(climbing(Rung.RELEASED, Rung.RELEASED, backoffLimit=2))
    assert seen.climb is not None
    used = replace(seen.climb, tally=FailureTally(pod_restarts=7, step_retries=1, counted=(2, 2)))
    decided = plan(replace(seen, climb=used))
    assert "backoffLimit 2 is used up by 2 failures within 10 steps (6 more do not count)" in decided.message
    one_more = replace(used, tally=replace(used.tally, pod_restarts=2))
    assert "(1 more do not count)" in plan(replace(seen, climb=one_more)).message
    none = plan(dead(climbing(Rung.RELEASED, Rung.RELEASED, backoffLimit=0))).message
    assert "backoffLimit 0 is used up by 0 failures within" in none
    all_count = replace(seen.climb, tally=FailureTally(step_retries=1, counted=(2, 2)))
    assert "by 2 failures within 10 steps: " in plan(replace(seen, climb=all_count)).message, "also of a retried job"


# ------------------------------------------------------------------------------------------------------ what counts
def fail(cause: FailureCause, **fields: Any) -> Climb:
    """Return what is decided about a failure, with a rule for it if one is given."""
    rules = policy(rule(cause, action=fields.pop("action", cause.answers[-2]), **fields)) if fields else None
    match cause:
        case FailureCause.TRAINER_DIED:
            seen = dead(climbing(Rung.RELEASED, Rung.RELEASED, failure_policy=rules))
        case FailureCause.NOT_RETRIABLE:
            seen = diverged(climbing(Rung.RELEASED, Rung.RELEASED, failure_policy=rules))
        case FailureCause.OUT_OF_MEMORY:
            seen = dead(climbing(Rung.RELEASED, Rung.RELEASED, failure_policy=rules), memory_kills=1)
        case FailureCause.RUNG_DEADLINE:
            seen = stuck(Rung.TRAINED, Rung.RELEASED, failure_policy=rules or policy())
        case FailureCause.WEIGHTS_DIFFER:
            seen = differing(failure_policy=rules)
        case FailureCause.PODS_NOT_READY:
            seen = absent(failure_policy=rules)
        case FailureCause.BAD_DEVICE:
            seen = changed(climbing(Rung.SERVING, Rung.SERVING, failure_policy=rules), 1, ill_device="GPU-1")
        case FailureCause.ENGINE_LOST:
            seen = engine_lost(climbing(Rung.OFFLOADED, Rung.SERVING, failure_policy=rules), 0, 1)
        case FailureCause.POD_EVICTED | FailureCause.POD_FAILED | FailureCause.MEMBER_SILENT:
            seen = changed(
                climbing(Rung.SERVING, Rung.SERVING, failure_policy=rules), 1, facts=None, **dict(LOST)[cause]
            )
            if rules is None:
                seen = refilled(following(seen, plan(seen)) if cause is FailureCause.MEMBER_SILENT else seen)
    return climb_of(plan(seen))


COUNTS = {
    FailureCause.ENGINE_LOST: True,
    FailureCause.TRAINER_DIED: True,
    FailureCause.NOT_RETRIABLE: True,
    FailureCause.OUT_OF_MEMORY: True,
    FailureCause.RUNG_DEADLINE: True,
    FailureCause.WEIGHTS_DIFFER: True,
    FailureCause.POD_FAILED: True,
    FailureCause.BAD_DEVICE: False,
    FailureCause.PODS_NOT_READY: False,
    FailureCause.MEMBER_SILENT: False,
    FailureCause.POD_EVICTED: False,
}


def test_each_cause_says_whether_it_counts() -> None:
    assert COUNTS == {cause: cause.counts for cause in FailureCause}


GOES_ON = [cause for cause in FailureCause if cause.answers[0] is not FailureAction.FAIL_JOB]


@pytest.mark.parametrize("cause", [cause for cause in GOES_ON if cause is not FailureCause.ENGINE_LOST])
def test_without_a_rule_a_failure_counts_as_its_cause_does(cause: FailureCause) -> None:
    assert int(COUNTS[cause]) == fail(cause).restarts


@pytest.mark.parametrize("cause", FailureCause)
def test_a_rule_that_does_not_say_counts_as_its_cause_does(cause: FailureCause) -> None:
    assert int(COUNTS[cause]) == fail(cause, action=cause.answers[-2]).restarts


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("cause", [cause for cause in FailureCause if cause is not FailureCause.ENGINE_LOST])
def test_a_rule_that_says_whether_it_counts_is_believed(cause: FailureCause, counts: bool) -> None:
    climb = fail(cause, counts=counts)
    assert int(counts) == climb.restarts
    assert str(cause) == climb.tally.cause


@pytest.mark.parametrize("cause", [FailureCause.POD_EVICTED, FailureCause.TRAINER_DIED])
@pytest.mark.parametrize("counts", [False, True])
def test_the_event_says_what_does_not_count(cause: FailureCause, counts: bool) -> None:
    rules = policy(rule(cause, action="RestartPod", counts=counts))
    seen = climbing(Rung.RELEASED, Rung.RELEASED, failure_policy=rules)
    lost = dead(seen) if cause is FailureCause.TRAINER_DIED else changed(seen, 1, facts=None, **dict(LOST)[cause])
    assert counts is not plan(lost).message.endswith(
        "(failurePolicy.rules[0]), which does not count against backoffLimit"
    )


# -------------------------------------------------------------------------------------- of trainers that end in a drain
def told_to_end(seen: Observation, index: int) -> Observation:
    """The container of that pod got SIGTERM."""
    facts = seen.members[index].pod_facts
    assert facts is not None
    return changed(seen, index, facts=facts.model_copy(update={"ending": True}))


@pytest.mark.parametrize("is_told_first", [False, True], ids=["trainer, then pod", "pod, then trainer"])
@pytest.mark.parametrize("failure_policy", [None, policy(), policy(rule("TrainerDied", action="FailJob"))])
def test_trainers_that_end_in_a_drain_have_not_died_whoever_tells_of_it_first(
    is_told_first: bool, failure_policy: dict[str, Any] | None
) -> None:
    """The trainers of the pod that is drained end, and break the collectives of all others."""
    seen = climbing(Rung.RELEASED, Rung.RELEASED, failure_policy=failure_policy, backoffLimit=0)
    for sign in ("pod", "trainer", "others") if is_told_first else ("trainer", "others", "pod"):
        match sign:
            case "pod":
                seen = changed(seen, 1, **TAKEN_AWAY["drained"])
            case "trainer":
                seen = dead(told_to_end(seen, 1), 1)
            case "others":
                seen = dead(seen, 0)
        assert not plan(seen).raises, f"after the {sign}"
    climb = climb_of(plan(refilled(changed(seen, 1, facts=None), is_gone=True)))
    assert (Cause.POD_REPLACED, 0, "PodEvicted") == (climb.cause, climb.restarts, climb.tally.cause)


def test_trainers_of_a_container_that_was_told_to_end_and_came_back_have_died() -> None:
    """Its pod was left alone."""
    seen = dead(told_to_end(climbing(Rung.RELEASED, Rung.RELEASED), 0))
    held = plan(seen)
    assert not held.raises
    assert held.wait is not None
    assert "gpu-0 (its container was signalled to end)" == held.wait.message
    facts = seen.members[0].pod_facts
    assert facts is not None
    back = changed(seen, 0, facts=facts.model_copy(update={"ending": False}))
    assert (Cause.TRAINER_DIED, 1) == (climb_of(plan(back)).cause, climb_of(plan(back)).restarts)


# -------------------------------------------------------------------------------------------- of pods that do not come
def absent(failure_policy: dict[str, Any] | None = None, **spec: Any) -> Observation:
    """A pod of a group has been away for longer than is allowed."""
    seen = climbing(Rung.SERVING, Rung.SERVING, failure_policy=failure_policy, podsReadyDeadlineSeconds=60, **spec)
    return later(changed(seen, 1, facts=None, phase=PodPhase.PENDING, trouble="not scheduled: no GPU is free"), 60)


def queued(seen: Observation) -> Observation:
    """Everybody has stopped, and no pod is left."""
    return remember(replace(seen, climb=climb_of(plan(seen)), members=()))


def test_a_job_whose_pods_do_not_come_gives_its_devices_back_and_says_when_it_tries_again() -> None:
    seen = absent()
    decided = plan(seen)
    climb = climb_of(decided)
    assert (Cause.PODS_NOT_READY, 0, "Requeue", 1) == (
        *(climb.cause, climb.restarts, climb.tally.action, climb.tally.tries),
    )
    assert {Goal.STOP} == {target.goal for target in decided.targets.values() if isinstance(target, PodTarget)}
    assert "gpu-1 (not scheduled: no GPU is free): all pods go, and the job tries again in" in decided.message
    wait_s = queue_s(seen, climb)
    resting = queued(seen)
    assert not plan(later(resting, wait_s - 1)).raises
    assert pytest.approx(resting.now + wait_s) == plan(resting).wake_at
    again = climb_of(plan(later(resting, wait_s)))
    assert (Cause.RESUMED, 2, "", 1) == (again.cause, again.step, again.group, again.tally.tries)


def test_a_job_waits_in_the_queue_for_at_least_half_a_minute_and_at_most_twenty() -> None:
    assert (30.0, 600.0) == (QUEUE_S, MAX_QUEUE_S)


def test_jobs_come_back_from_the_queue_at_different_moments_and_later_each_time() -> None:
    seen, waits = absent(), []
    for tries in range(1, 9):
        climb = replace(climb_of(plan(seen)), tally=FailureTally(tries=tries))
        waits.append([queue_s(replace(seen, job=replace(seen.job, uid=names.JobUid(uid))), climb) for uid in "abc"])
        least = min(QUEUE_S * 2 ** (tries - 1), MAX_QUEUE_S)
        assert all(least <= wait_s < 2 * least for wait_s in waits[-1])
    assert all(len(set(of_jobs)) == 3 for of_jobs in waits)


def test_of_jobs_that_gave_up_as_often_the_oldest_comes_back_first_and_holds_up_no_other_for_long() -> None:
    """The younger of two that waited for each other's devices was as likely to take them all."""
    seen = absent()
    climb = climb_of(plan(seen))
    waits: dict[bool, list[float]] = {}
    for has_elder in (False, True):
        of_jobs = [
            replace(seen, has_elder=has_elder, job=replace(seen.job, uid=names.JobUid(f"uid {n}"))) for n in range(20)
        ]
        waits[has_elder] = [queue_s(each, climb) for each in of_jobs]
    assert max(waits[False]) < 1.5 * QUEUE_S < min(waits[True])
    assert max(waits[False]) - min(waits[False]) > QUEUE_S / 4, "they do not come at one moment"
    assert max(waits[True]) < 2 * QUEUE_S
    alone = queued(seen)
    younger = replace(alone, has_elder=True)
    due = later(younger, queue_s(alone, climb))
    assert plan(replace(due, has_elder=False)).raises, "nobody is before it"
    assert not plan(due).raises
    assert plan(later(younger, 2 * QUEUE_S)).raises, "whether the elder has come back or not"


def test_a_new_leader_leaves_a_queued_job_in_its_queue() -> None:
    resting = replace(queued(absent()), memory=Memory())
    assert not plan(remember(resting)).raises


def test_a_job_that_was_never_started_fails_where_a_rule_says_so() -> None:
    job = make_job(podsReadyDeadlineSeconds=60, failurePolicy=policy(rule("PodsNotReady", action="FailJob")))
    decided = plan(later(make_observation(job, [None, None], climb=None, rollout=None), 60))
    climb = climb_of(decided)
    assert (Cause.FAILURE_POLICY, 0, 0, "FailJob") == (climb.cause, climb.step, climb.lineage, climb.tally.action)


def test_a_queued_job_that_was_never_started_starts_for_the_first_time() -> None:
    job = make_job(podsReadyDeadlineSeconds=60)
    seen = later(make_observation(job, [None, None], climb=None, rollout=None), 60)
    resting = queued(seen)
    climb = climb_of(plan(later(resting, 2 * QUEUE_S)))
    assert (Cause.RESUMED, 0, 0, "") == (climb.cause, climb.step, climb.lineage, climb.group)
    blank: list[PodFacts | None] = [facts_at(Rung.RELEASED, WeightVersion(0, 0), epoch=0)] * 2
    seen = make_observation(job, blank, climb=climb, rollout=rollout_facts(epoch=0))
    climb = climb_of(plan(seen))
    assert (Cause.FIRST_START, 1, 1) == (climb.cause, climb.lineage, climb.tally.tries)
    assert plan(seen).message.startswith("every member answers: ")


def test_a_queued_job_can_be_suspended_and_comes_to_its_end_in_time() -> None:
    resting = queued(absent(activeDeadlineSeconds=100))
    suspended = resting.job.spec.model_copy(update={"suspend": True})
    climb = climb_of(plan(replace(resting, job=replace(resting.job, spec=suspended))))
    assert Cause.SUSPENDED is climb.cause
    late = replace(resting, started_at=resting.now - 100)
    assert Cause.DEADLINE is climb_of(plan(late)).cause
    soon = replace(resting, started_at=resting.now - 99)
    assert resting.now + 1 == plan(soon).wake_at


def test_a_rule_may_end_a_job_whose_pods_do_not_come_again_and_again() -> None:
    rules = policy(
        rule("PodsNotReady", action="Requeue", maxTries=2, counts=True), rule("PodsNotReady", action="FailJob")
    )
    seen = absent(failure_policy=rules, backoffLimit=1)
    assert seen.climb is not None
    first = climb_of(plan(seen))
    assert (Cause.PODS_NOT_READY, 1, 1) == (first.cause, first.restarts, first.tally.pod_restarts)
    given_up = plan(replace(seen, climb=replace(first, cause=Cause.RESUMED)))
    assert Cause.BACKOFF_LIMIT is climb_of(given_up).cause
    assert "backoffLimit 1 is used up by 1 failure within 10 steps" in given_up.message
    tried = replace(seen.climb, tally=FailureTally(step=2, tries=2))
    assert Cause.FAILURE_POLICY is climb_of(plan(replace(seen, climb=tried))).cause
