"""Targets are the files of the pure core whose mutants are tried, each with the tests that must notice them."""

from __future__ import annotations

_OF_AGENT = ("unit/test_agent_engines.py", "unit/test_agent_facts*.py", "unit/test_agent_hazards.py")
# Not the searches test_plan_model and test_plan_properties: they are slow, and no test states what they alone notice.
_OF_PLAN = ("unit/test_ladder.py", "unit/test_plan.py", "unit/test_plan_mixed.py", "unit/test_plan_[!mp]*.py")
_PLANNER = "operator/colocated_rl_operator/planner"
_AGENT = "workloads/agent/colocated_rl_agent"
_ROLLOUT = "workloads/rollout/colocated_rl_rollout"
TARGETS: dict[str, tuple[str, ...]] = {
    "operator/colocated_rl_api/holders.py": ("unit/test_holders.py",),
    "operator/colocated_rl_api/ladder.py": _OF_PLAN,
    f"{_PLANNER}/failure_policy.py": _OF_PLAN,
    f"{_PLANNER}/last_save.py": _OF_PLAN,
    f"{_PLANNER}/notices.py": _OF_PLAN,
    f"{_PLANNER}/plan.py": _OF_PLAN,
    f"{_PLANNER}/resizing.py": _OF_PLAN,
    f"{_PLANNER}/roster.py": _OF_PLAN,
    f"{_PLANNER}/silence.py": _OF_PLAN,
    f"{_PLANNER}/size.py": _OF_PLAN,
    f"{_PLANNER}/targets.py": _OF_PLAN,
    f"{_AGENT}/lanes/update_check.py": ("unit/test_agent_update_check.py",),
    f"{_AGENT}/planner/engines.py": _OF_AGENT,
    f"{_AGENT}/planner/next_actions.py": _OF_AGENT,
    f"{_AGENT}/planner/spans.py": ("unit/test_agent_spans.py",),
    f"{_ROLLOUT}/rules/filters.py": ("unit/test_rollout_filters.py",),
    f"{_ROLLOUT}/rules/overlong.py": ("unit/test_rollout_overlong.py",),
    f"{_ROLLOUT}/rules/resume.py": ("unit/test_rollout_resume.py",),
    f"{_ROLLOUT}/rules/staleness.py": ("unit/test_rollout_staleness.py",),
    f"{_ROLLOUT}/sealer.py": ("unit/test_rollout_sealer.py",),
    f"{_ROLLOUT}/store/batches.py": tuple(f"unit/test_rollout_{part}.py" for part in ("batches", "recording", "store")),
    "workloads/trainer/colocated_rl_trainer/grpo/batch.py": ("contract/test_trainer_batch.py",),
    "workloads/trainer/colocated_rl_trainer/grpo/loss.py": ("contract/test_trainer_loss.py",),
}
