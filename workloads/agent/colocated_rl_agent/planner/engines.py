"""This module chooses the next actions of a pod with any number of engines, by the table for a pod with one. Pure.

The table is asked once for each engine, as if it were the pod's only one. So each engine goes down and up its ladder by
the same rules as a single one, and those that are ready don't wait for one that starts again. Only the trainers see
more than one engine:

* what trainers do, and the end of the pod, is done once the table chooses it for every engine that has a process: then
  no engine maps memory where it must not. An engine without a process maps nothing, so it holds nobody up;
* what they keep, a checkpoint above all, is in host memory, and waits for those engines alone that answer;
* files are compared with their manifest as soon as the table chooses that for any engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import compress
from typing import NamedTuple

from colocated_rl_agent.planner.actions import Action, Lane, Mirror, Save, SaveModel, VerifyExport, Wait
from colocated_rl_agent.planner.next_actions import Rules, next_actions
from colocated_rl_agent.planner.views import PodView
from colocated_rl_api.facts import EngineState
from colocated_rl_api.member_wire import PodTarget


class EngineChoice(NamedTuple):
    """An EngineChoice is an action. engine: the index of the engine that it is for; 0 for what is for the whole pod."""

    engine: int
    action: Action | Wait


def choices(views: Sequence[PodView], target: PodTarget | None, rules: Rules) -> list[EngineChoice]:
    """Return the next safe actions and waits. views: the pod as each of its engines sees it."""
    chosen = [next_actions(view, target, rules) for view in views]
    return [*_of_engines(chosen), *_of_pod(views, chosen)]


def _of_engines(chosen: Sequence[Sequence[Action | Wait]]) -> Iterator[EngineChoice]:
    for engine, actions in enumerate(chosen):
        for action in actions:
            if isinstance(action, Wait) or action.lane in (Lane.GATE, Lane.ENGINE):
                yield EngineChoice(engine, action)


def _of_pod(views: Sequence[PodView], chosen: Sequence[Sequence[Action | Wait]]) -> Iterator[EngineChoice]:
    with_process = [actions for view, actions in zip(views, chosen, strict=True) if not view.engine.is_absent]
    voters = with_process or chosen
    up = [*compress(chosen, [view.engine.state is EngineState.READY for view in views])]
    for action in dict.fromkeys(action for actions in chosen for action in actions):
        asked = (up or voters) if isinstance(action, Save | Mirror | SaveModel) else voters
        is_agreed = _is_of_pod(action) and all(action in actions for actions in asked)
        if is_agreed or isinstance(action, VerifyExport):
            yield EngineChoice(0, action)


def _is_of_pod(action: Action | Wait) -> bool:
    return not isinstance(action, Wait) and action.lane in (Lane.TRAINERS, Lane.POD)
