"""Say which flags a job may give its engine, for each server and the version of it that this release drives.

Flags belong to one version of one server, so the schema of the resource does not know them. `kubectl crlj validate`
judges them here before a job is sent, and the operator before it makes anything of a job (condition Stalled, reason
InvalidSpec). The agent's driver refuses an engine of another version.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from colocated_rl_api import names
from colocated_rl_api.job import ColocatedRLJobSpec, EngineType, Mode, Trainer
from colocated_rl_api.rungs import Placement

ARGS = ("rollout", "engine", "args")
WIDER_DTYPES = ("BF16", "F32")  # than float16 in range, as safetensors spells them: the default trainer exports one


class RefusedFlag(NamedTuple):
    """A RefusedFlag is one thing that an engine of a spec can't be given. field: path below the spec."""

    field: tuple[str | int, ...]
    message: str


def abbreviates(arg: str, flag: str) -> bool:
    """Return whether an argument is the flag, or shortens it as argparse lets it, ambiguous or not."""
    return arg.startswith("--") and flag.startswith(arg.partition("=")[0])


@dataclass(frozen=True)
class Server:
    """A Server holds what is known of one.

    versions: those that this release drives, the newest last. owned: flags that the agent sets, that no switch
    survives, or whose feature is not supported yet. room: flags of which a job gives one if trainer or reference
    stay on its devices. speculation: the flag that chooses how tokens are guessed, and guesses: its values without a
    second model, whose weights neither a release nor an update takes care of. dtype: the flag that chooses in what it
    computes. variables: of its environment, with the reason why a job may not set them.
    """

    name: str
    versions: tuple[str, ...]
    owned: tuple[str, ...]
    room: tuple[str, ...]
    speculation: str
    guesses: tuple[str, ...]
    dtype: str
    variables: Mapping[str, str]

    def owns(self, arg: str) -> bool:
        """Return whether an argument is such a flag, or abbreviates one as argparse lets it."""
        return any(abbreviates(arg, flag) for flag in self.owned)


SGLANG = Server(
    name="SGLang",
    versions=("0.5.23",),
    owned=(
        "--model-path", "--model", "--host", "--port", "--weight-version", "--served-model-name", "--api-key",
        "--admin-api-key", "--enable-memory-saver", "--sleep-on-idle", "--skip-server-warmup", "--dp-size",
        "--data-parallel-size", "--tokenizer-worker-num", "--incremental-streaming-output",
        "--delete-ckpt-after-loading", "--weight-cache-mode", "--max-queued-requests", "--skip-tokenizer-init",
        "--enable-hierarchical-cache", "--disaggregation-mode", "--config", "--quantization", "--enable-lora",
        "--nnodes", "--node-rank", "--dist-init-addr", "--nccl-init-addr", "--allow-auto-truncate",
    ),
    room=("--mem-fraction-static", "--max-total-tokens"),
    speculation="--speculative-algorithm",
    guesses=("NGRAM",),
    dtype="--dtype",
    variables={"NCCL_GRAPH_REGISTER": "with released memory NCCL waits for ever on what it has registered"},
)  # fmt: skip
SERVERS = {EngineType.SGLANG: SGLANG}


def refusals(spec: ColocatedRLJobSpec) -> Iterator[RefusedFlag]:
    """Yield what is wrong with the engine's flags."""
    server, args = SERVERS[spec.rollout.engine.type], spec.rollout.engine.args
    for place, arg in enumerate(args):
        if server.owns(arg):
            yield RefusedFlag(
                (*ARGS, place),
                f"{arg} is or abbreviates a flag of {server.name} {server.versions[-1]} that the operator sets, that "
                "no switch survives or that is not supported yet: remove it",
            )
        elif arg.startswith("--") and " " in arg.split("=")[0]:
            yield RefusedFlag((*ARGS, place), f"{arg} is more than one word: write --flag=value, or two items")
        elif abbreviates(arg, server.speculation) and (value := _value(args, place)) not in server.guesses:
            yield RefusedFlag(
                (*ARGS, place),
                f"{server.speculation} {value} guesses tokens by a second model, whose memory a release may leave "
                f"unmapped and whose weights an update takes from the first: use {' or '.join(server.guesses)}, or "
                "remove it",
            )
        elif (
            abbreviates(arg, server.dtype)
            and _trains_by_default(spec)
            and (overflow := overflowing(_value(args, place), WIDER_DTYPES))
        ):
            yield RefusedFlag((*ARGS, place), overflow)
    if (others := _neighbours(spec)) and not any(arg.startswith(server.room) for arg in args):
        yield RefusedFlag(
            ARGS,
            f"with {' and '.join(others.values())} {' and '.join(('engine', *others))} are on the GPUs together: add "
            f"{server.room[0]} and its value, so that the engine leaves room for {' and '.join(others)}",
        )
    yield from _refused_variables(spec, server.variables)


def dtype_of(args: Sequence[str]) -> str | None:
    """Return the dtype that an engine's flags name, as they spell it; None: it takes the one of its weights."""
    values = [_value(args, place) for place, arg in enumerate(args) if abbreviates(arg, SGLANG.dtype)]
    return values[-1] if values else None


def overflowing(engine: str | None, exported: Iterable[str]) -> str | None:
    """Return why weights of these dtypes, as safetensors spells them, can't be loaded in the engine's, or None."""
    if engine not in ("float16", "half") or not (wider := sorted({*WIDER_DTYPES}.intersection(exported))):
        return None
    return (
        f"float16 has not the range of weights exported as {' or '.join(wider)}: small ones become zero, large "
        "ones infinite. Set --dtype to bfloat16 or float32 in rollout.engine.args"
    )


def _refused_variables(spec: ColocatedRLJobSpec, refused: Mapping[str, str]) -> Iterator[RefusedFlag]:
    own = (names.ROLE_ENGINE,) if spec.pod_templates.engine else ()
    shared = () if own and spec.rollout.is_apart else (names.ROLE_GPU,)
    templates = {role: spec.pod_templates.of(role).spec.containers for role in (*shared, *own)}
    for role, i, container in [(role, *each) for role, found in templates.items() for each in enumerate(found)]:
        for j, variable in enumerate(container.env):
            if (why := refused.get(variable.name)) is not None:
                field = ("podTemplates", role, "spec", "containers", i, "env", j, "name")
                yield RefusedFlag(field, f"{variable.name} is set by the engine, and {why}: remove it")


def _value(args: Sequence[str], place: int) -> str:
    """Return the value of the flag at a place: behind its equals sign, or the next item."""
    _, sign, value = args[place].partition("=")
    return value if sign else "".join(args[place + 1 : place + 2])


def _trains_by_default(spec: ColocatedRLJobSpec) -> bool:
    """Return whether the default trainer writes the weights; another one may write them in any dtype."""
    return spec.mode is Mode.FULL and spec.trainer.command == Trainer().command


def _neighbours(spec: ColocatedRLJobSpec) -> dict[str, str]:
    """Return who stays on GPUs with an engine, each with the setting for which it does."""
    stay = {
        "trainer": ("offload []", spec.placement is Placement.RESIDENT),
        "reference": ("reference.placement WithRollout", spec.scores_beside_engines),
    }
    return {who: why for who, (why, does) in stay.items() if does and spec.engine_gpus.count}
