"""This module sees an engine over several pods from each of them. Pure.

The first pod starts the engine's first part, makes every call and has the gate: it acts as about any engine. In another
pod the agent starts its part once the first pod has started one, and ends it when that one is gone; whatever is called
reaches the part through the engine itself. In between it takes the facts that the first pod reports, and the operator
passes on (`member_wire.EngineSpan`), for those of an engine of its own, so the same table moves its trainers. They may
be late, and do no harm: nobody goes beyond a barrier before every pod has reached it.

The loss of any part is the loss of the engine. The first pod ends its part when another one's has ended, or when
another pod has taken the place of one; then the parts in the other pods end too, and the engine starts again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from colocated_rl_agent.planner.actions import Action, KillEngine, Lane, StartEngine, VerifyExport, Wait
from colocated_rl_agent.planner.views import CUDA_GRAPH, KV_CACHE, WEIGHTS, EngineView, PodView, Share
from colocated_rl_api.facts import EngineFacts, EngineState, TagState
from colocated_rl_api.ladder import Ladder
from colocated_rl_api.member_wire import EngineSpan, Goal, PodTarget
from colocated_rl_api.rungs import WeightVersion


def as_part(pod: PodView, span: EngineSpan | None, *, pods: int) -> PodView:
    """Return the pod with a part of another pod's engine, as if that engine were its own.

    pod: with its own process. pods: of the engine.
    """
    engine, gate = (span.engine, span.gate) if span else (None, None)
    is_new = engine is not None and engine.is_starting and engine.incarnation != pod.engine.part_of  # joined once
    joins_on = engine.starts_on if engine and is_new and _is_complete(span, pods) else None
    seen = replace(pod, engine=_engine_of(pod.engine, engine), share=Share.FOLLOWS, joins_on=joins_on)
    if gate is None or pod.terminating or seen.engine.state is not EngineState.READY:
        return seen  # a pod that ends does not wait for another's requests
    return replace(seen, gate_open=gate.open, in_flight=0 if gate.settled else 1)


def _engine_of(process: EngineView, engine: EngineFacts | None) -> EngineView:
    """Return the view of an engine, of which a part is this process."""
    if process.is_absent or process.broken is not None or engine is None:
        return process
    if engine.incarnation != process.part_of:
        return process.broke("the engine that it was a part of has ended")
    if not engine.is_ready:
        return process
    tags = {WEIGHTS: engine.weights, KV_CACHE: engine.kv_cache, CUDA_GRAPH: engine.cuda_graph}
    return replace(
        process,
        state=EngineState.READY,
        version=engine.version,
        paused=engine.paused,
        drained=engine.drained,
        released=TagState.RELEASED in tags.values(),
        checksum=engine.checksum,
        noise_nats=engine.noise_nats,
        tags=tags,
    )


def as_first(pod: PodView, span: EngineSpan | None, *, pods: int) -> PodView:
    """Return the pod with the first part of its engine. pods: of the engine."""
    return replace(pod, share=Share.LEADS if _is_complete(span, pods) else Share.LACKS)


def _is_complete(span: EngineSpan | None, pods: int) -> bool:
    return span is not None and len(span.pods) == pods


def lost(engine: EngineView, span: EngineSpan | None, pods: tuple[str, ...]) -> str:
    """Return why the engine is lost with its first part still there; "" if it is not. pods: it was started with."""
    if span is None or engine.is_absent:
        return ""
    if engine.incarnation == span.lost:
        return "a part of it in another pod has ended"
    return "" if span.pods == pods else "a pod with a part of it is gone or was recreated"


def shares_of(
    actions: Sequence[Action | Wait], pod: PodView, target: PodTarget | None, ladder: Ladder
) -> Iterator[Action | Wait]:
    """Yield what this pod does of the actions that the table chose: the rest is another pod's, and waited for."""
    for action in actions:
        is_ours = isinstance(action, Wait) or pod.share is None or _is_ours(action, pod, target, ladder)
        yield action if is_ours else Wait()
    is_climbing = target is not None and target.goal is Goal.CLIMB and pod.runner_known and not pod.terminating
    if is_climbing and pod.joins_on is not None and pod.engine.is_absent and not ladder.takes_turns:
        yield _join(pod, pod.joins_on, ladder)  # whatever the first pod has started: trainers are on the devices anyway


def _join(pod: PodView, version: WeightVersion, ladder: Ladder) -> Action | Wait:
    """Start a part on weights that this pod has compared too: it may hold them in files of its own."""
    if pod.whole == version or not ladder.trains:
        return StartEngine(version)
    return VerifyExport(version) if pod.now >= pod.verify_after else Wait(until=pod.verify_after)


def _is_ours(action: Action, pod: PodView, target: PodTarget | None, ladder: Ladder) -> bool:
    match action:
        case StartEngine(version=version) if pod.share is Share.FOLLOWS:
            return ladder.takes_turns and version == pod.joins_on
        case StartEngine():
            return pod.share is Share.LEADS
        case KillEngine() if pod.share is Share.FOLLOWS:
            is_stopped = target is not None and target.goal is Goal.STOP
            return pod.terminating or is_stopped or pod.engine.broken is not None
        case _:
            return pod.share is not Share.FOLLOWS or action.lane not in (Lane.GATE, Lane.ENGINE)
