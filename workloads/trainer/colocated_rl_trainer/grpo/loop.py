"""Train by GRPO on sealed batches, data parallel, with AdamW: the default trainer.

`GRPOTrainer.train` is one step on one screen. Every rank computes the gradient of its own samples; the gradient is
summed over ranks, and every normalizer is of all ranks, so the split of a batch changes nothing but rounding. Ranks
share the model and its state (`sharding`), or each has all of it: that changes nothing but rounding either. The step
number decides everything else that could differ between two runs (learning rate, division into minibatches): a replay
of the same batches from a checkpoint gives the same weights, on the CPU the same bits.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from colocated_rl_api.logs import log
from colocated_rl_api.names import PromptPosition
from colocated_rl_api.weights import Digest
from colocated_rl_trainer.grpo.batch import (
    MicroBatch,
    Shard,
    Use,
    deal_minibatches,
    micro_batches,
    read_together,
)
from colocated_rl_trainer.grpo.budget import host_memory
from colocated_rl_trainer.grpo.forecast import Forecast
from colocated_rl_trainer.grpo.forward import logp_and_entropy
from colocated_rl_trainer.grpo.loss import importance_mask, importance_ratio, kl_penalty, kl_ratio, policy_loss
from colocated_rl_trainer.grpo.scores import find_scores, write_scores
from colocated_rl_trainer.grpo.tally import StepTally, metrics
from colocated_rl_trainer.grpo.trackers import Tracker, check_trackers, make_trackers
from colocated_rl_trainer.protocol.manifest import Exported, digest_of, digests_of
from colocated_rl_trainer.protocol.rank import Diverged, Refused, Watch
from colocated_rl_trainer.protocol.settings import ConfigError, LoraConfig, RankSettings, TrainerConfig
from colocated_rl_trainer.state.checkpoint import Checkpoints
from colocated_rl_trainer.state.experts import RouterReplay
from colocated_rl_trainer.state.export import FILE_BYTES, Writers, write_files, write_index
from colocated_rl_trainer.state.group import Collectives, join_group
from colocated_rl_trainer.state.head import ScoringForward
from colocated_rl_trainer.state.lora import AdapterOrigin, Adapters
from colocated_rl_trainer.state.mirror import MirrorPart, Mirrors
from colocated_rl_trainer.state.residency import PARAMETERS, STATE, Residency
from colocated_rl_trainer.state.sharding import (
    computing_in,
    divide,
    read_parts,
    shapes_in,
    write_parts,
)
from colocated_rl_trainer.state.weights import (
    checkpoint_activations,
    files_of_model,
    load_model,
    probe,
    tensors_beside,
)

UPDATES = "updates"  # optimizer calls so far, beside the state's tensors
ORIGIN = "adapter.json"  # of a checkpoint, where adapters are trained

_LOG = logging.getLogger(__name__)


class DeviceFull(Exception):
    """A forward or backward pass ran out of memory. The weights are intact; the settings must change."""


@dataclass(frozen=True)
class _Work:
    """Holds this rank's part of a minibatch. It may be empty: the rank's peers wait for it nevertheless."""

    divisor: int  # of the loss: tokens or samples of all ranks
    micro_batches: list[MicroBatch | None]  # None: a pass that peers make, for which this rank has nothing left


@dataclass(frozen=True)
class _Known:
    """Holds log-probabilities of the shard's tokens, [T]; NaN for tokens that the step does not need."""

    start: Tensor  # under the weights that the step begins with
    reference: Tensor | None  # under the reference, where there is one


class GRPOTrainer:
    """Trains on one rank. The methods are those of `rank.ScoringLoop` and `rank.MirroringLoop`."""

    file_bytes = FILE_BYTES  # most of one file of weights

    def __init__(self, settings: RankSettings, config: TrainerConfig) -> None:
        self._settings = settings
        self._config = config
        spec = settings.read_job().spec
        self._progress_s = spec.switch.trainer_progress_seconds
        self._limit = spec.rollout.max_response_tokens
        on_cpu = settings.device == "cpu"
        self._forecast = Forecast(spec, config, settings.model, settings.world_size, on_cpu=on_cpu)
        self._is_shared = self._forecast.is_shared
        self._adapters: Adapters | None = None
        self._origin: AdapterOrigin | None = None  # of the adapters
        self._trains_parts = self._is_shared and config.lora is None  # otherwise each rank has all that is trained
        self._stays = [kind for memory, kinds in STATE.items() if memory not in spec.trainer.offload for kind in kinds]
        self._device = torch.device(settings.device)
        self._dtype = self._forecast.dtype
        self._checkpoints = Checkpoints.of(settings)
        self._mirrors: Mirrors | None = None
        self._saved = 0  # step of the newest checkpoint
        self._use = Use(
            advantage=config.advantage,
            max_token_age=config.max_token_age,
            equal_too=config.kl_coefficient > 0 or config.entropy_coefficient > 0,
        )
        self._has_reference = spec.reference is not None
        self._keeps_reference = self._has_reference and not spec.seals_with_scores  # otherwise batches have its scores
        if config.kl_coefficient and not self._has_reference:
            raise ConfigError(
                "klCoefficient in spec.trainer.config needs a policy to compare with: add spec.reference to the job"
            )
        self._drops_inputs = config.lora is not None and config.lora.dropout > 0  # in passes with gradient
        self._replays = spec.rollout.router_replay
        self._replay: RouterReplay | None = None
        self._skipped_in_a_row = 0  # updates
        self._prompt_position: PromptPosition | None = None  # of the newest batch
        self._scored: tuple[int, Tensor] | None = None  # newest step that the reference has scored, and its scores
        check_trackers(config.trackers)
        self._trackers: Sequence[Tracker] = ()
        if config.threads is not None:
            torch.set_num_threads(config.threads)

    def load(self) -> int:
        """Read this rank's part of the newest state: in memory, of a checkpoint, or the model. Returns its step."""
        recomputes = self._check_budget()
        self._group: Collectives = join_group(self._settings)
        self._recomputes = any(self._group.gather(recomputes))  # ranks that share a model make the same passes
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        mirrored = self._find_mirror()
        found = None if mirrored else self._checkpoints.newest(self._group)
        with self._passing("load"):
            self.model = load_model(
                self._settings.model,
                packing=self._config.packing,
                share=self._divide if self._is_shared else None,
                frozen=self._dtype if self._config.lora else None,
            )
            self._beside = tensors_beside(self.model, self._settings.model)
        if self._config.fp32_lm_head and not isinstance(self.model.forward, ScoringForward):
            name = type(self.model).__name__.removeprefix("FSDP")
            raise ConfigError(f"fp32LmHead in spec.trainer.config: {name} computes whole logits, so leave it out")
        if lora := self._config.lora:
            self._origin = self._find_origin(lora)
            self._adapters = Adapters(self.model, lora, seed=self._config.seed)
        if self._recomputes:
            checkpoint_activations(self.model)
        if self._replays:
            self._replay = RouterReplay(self.model)
            self._use = replace(self._use, experts=(self._replay.width, self._replay.experts))
        self._state = Residency(
            self.model,
            self._device,
            with_moments=self._config.optimizer == "AdamW",
            updates_on_host=self._config.updates_on_host,
            stays=self._stays,
        )
        if self._keeps_reference and self._adapters is None:
            self._state.keep_reference()  # before the checkpoint is read: the model as the job began with it
        if mirrored and self._mirrors:
            self._prompt_position = self._mirrors.read(mirrored, parts := self._to_keep())
            self._state.updates = int(parts[UPDATES])
            log(_LOG, "mirror read", step=mirrored.step)
        elif found:
            self._read_checkpoint(found.directory)
            log(_LOG, "checkpoint read", step=found.step)
        elif not self._trains_parts:  # replicas must begin alike
            for tensor in self._state.named(PARAMETERS).values():
                self._group.broadcast_in_place(tensor)
        step = mirrored.step if mirrored else found.step if found else 0
        if not mirrored:
            self._saved = step
        self._trackers = make_trackers(self._settings, self._config, step=step)
        return step

    def _find_mirror(self) -> MirrorPart | None:
        """Return this rank's part of a step that is newer than every checkpoint, if memory has one. It is verified."""
        if self._settings.mirrors is None:
            return None
        self._mirrors = Mirrors(
            self._settings.mirrors,
            self._group,
            lineage=self._settings.lineage,
            ranks_in_pod=self._forecast.ranks_in_pod,
            is_divided=self._trains_parts,
        )
        self._saved = self._group.led(self._checkpoints.newest_step)
        return self._mirrors.newest(after=self._saved)

    def _divide(self, model: PreTrainedModel) -> None:
        divide(model, self._device, ranks=self._group.size, dtype=self._dtype)

    def onload(self) -> None:
        self._state.onload()

    def offload(self) -> None:
        self._state.offload()

    def score(self, step: int, path: Path, scores: Path, watch: Watch) -> None:
        with self._explaining_full_device(step), self._passing("score"):
            shard, work = self._read_batch(step, path)
            digest = self._group.each(lambda: digest_of(path))[self._group.rank]
            logp = find_scores(scores, shard=digest, needed=_computed(shard, work))
            if not all(self._group.gather(logp is not None)):  # every rank makes a pass, or none does
                logp = torch.full_like(shard.behaviour_logp, torch.nan)
                with self._adapters.without() if self._adapters else self._state.as_reference():
                    self._compute(shard, work, into=logp, watch=watch, replays=False)  # it is another policy
                write_scores(scores, logp, shard=digest)
            assert logp is not None
            self._scored = step, logp

    def train(self, step: int, path: Path, watch: Watch) -> Mapping[str, float]:
        with self._explaining_full_device(step), self._passing("step"):
            return self._train(step, path, watch)

    def _train(self, step: int, path: Path, watch: Watch) -> Mapping[str, float]:
        config, state = self._config, self._state
        shard, work = self._read_batch(step, path)
        torch.manual_seed((config.seed * 1_000_003 + step) * self._group.size + self._group.rank)  # of dropout
        self._prompt_position = shard.header.prompt_position
        tally = StepTally.of(shard)
        known = self._look_up(step, shard, work, watch)
        learning_rate = config.learning_rate_at(step)
        for _data_pass in range(config.data_passes):
            for minibatch in work:
                for micro in minibatch.micro_batches:
                    if micro is None:
                        self._keep_up(with_gradient=True)
                    else:
                        with self._replaying(shard, micro):
                            self._add_gradient(shard, micro, minibatch.divisor, known, tally)
                    watch.progress()
                gradient_norm = self._sum_and_clip_gradients()
                if not math.isfinite(gradient_norm):
                    self._skip_update(step, gradient_norm, tally)
                    continue
                self._skipped_in_a_row = 0
                watch.mark_dirty()
                state.update(learning_rate=learning_rate, betas=config.betas, weight_decay=config.weight_decay)
                tally.add_update(gradient_norm)
        tally.add_mismatch(shard, known.start)
        tally.pageable_bytes = state.pageable_bytes
        figures = metrics(self._group.gather(tally), has_reference=self._has_reference)
        figures["learning_rate"] = learning_rate
        for tracker in self._trackers:
            tracker.write(step, figures)
        return figures

    def _look_up(self, step: int, shard: Shard, work: Sequence[_Work], watch: Watch) -> _Known:
        """Return the log-probabilities that must be known before the first update changes the weights."""
        start = torch.full_like(shard.behaviour_logp, torch.nan)
        if not self._config.bypass:
            # the first minibatch still meets those weights: unless dropout changes them, `_add_gradient` adds its own
            unknown = work if self._drops_inputs else work[1:]
            self._compute(shard, unknown, into=start, watch=watch, replays=True)
        if not self._keeps_reference:
            return _Known(start, shard.reference_logp if self._has_reference else None)
        assert self._scored is not None
        scored, reference = self._scored
        assert scored == step
        return _Known(start, reference)

    def _compute(self, shard: Shard, work: Sequence[_Work], *, into: Tensor, watch: Watch, replays: bool) -> None:
        for minibatch in work:
            for micro in minibatch.micro_batches:
                if micro is None:
                    self._keep_up(with_gradient=False)
                else:
                    with torch.no_grad(), self._replaying(shard, micro) if replays else nullcontext():
                        into[micro.tokens] = self._logp(shard, micro)[0].cpu()
                watch.progress()

    def _add_gradient(self, shard: Shard, micro: MicroBatch, divisor: int, known: _Known, tally: StepTally) -> None:
        """Add the gradient of one micro-batch to those before it."""
        config, device = self._config, self._device
        logp, entropy = self._logp(shard, micro)
        if tally.updates == 0 and not self._drops_inputs:
            known.start[micro.tokens] = logp.detach().cpu()
        behaviour_logp = shard.behaviour_logp[micro.tokens]
        proximal_logp = behaviour_logp if config.bypass else known.start[micro.tokens]
        importance, kept = self._importance(proximal_logp, behaviour_logp, micro.sample)
        proximal_logp, ratio = proximal_logp.to(device), importance.to(device)
        weight = self._weight(shard, micro).to(device)
        policy = policy_loss(
            logp,
            proximal_logp,
            shard.advantage[micro.sample].to(device),
            ratio * kept.to(device),
            weight,
            micro.sample,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            dual_clip=config.dual_clip,
            loss=config.loss,
        )
        loss = policy.total
        if config.entropy_coefficient:
            loss = loss - config.entropy_coefficient * (entropy * weight).sum()
        if known.reference is not None:
            reference_logp, estimator = known.reference[micro.tokens].to(device), config.kl_estimator
            if config.kl_coefficient:
                if config.kl_bias_correction:
                    weight = weight * kl_ratio(logp, proximal_logp, ratio)
                loss = loss + config.kl_coefficient * kl_penalty(logp, reference_logp, weight, estimator=estimator)
            tally.kl += float(kl_penalty(logp.detach(), reference_logp, torch.ones_like(logp), estimator=estimator))
        loss = loss / divisor
        loss.backward()
        tally.add_tokens(float(loss.detach()), policy, entropy, importance, kept, cap=config.importance_cap)

    def _importance(self, proximal_logp: Tensor, behaviour_logp: Tensor, sample: Tensor) -> tuple[Tensor, Tensor]:
        """Return the truncated importance ratio of each token, and whether the mask keeps it: [tokens] each."""
        config = self._config
        ratio = importance_ratio(
            proximal_logp, behaviour_logp, sample, cap=config.importance_cap, level=config.importance_level
        )
        if config.importance_mask is None:
            return ratio, torch.ones_like(ratio, dtype=torch.bool)
        assert config.importance_mask_low is not None
        assert config.importance_mask_high is not None
        kept = importance_mask(
            proximal_logp,
            behaviour_logp,
            sample,
            level=config.importance_mask,
            low=config.importance_mask_low,
            high=config.importance_mask_high,
        )
        return ratio, kept

    def export(self, directory: Path) -> Exported | None:
        """Write this rank's files; the ranks of a pod write at once into one directory. Raises on all ranks or none."""
        settings, group = self._settings, self._group
        pods: dict[int, list[int]] = {}
        # from here on every rank is in this method, so every directory is there
        for rank, first in enumerate(group.gather(settings.first_of_pod if settings.pod_writes_weights else None)):
            if first is not None:
                pods.setdefault(first, []).append(rank)
        writers = Writers(group.rank, list(pods.values()))
        with self._passing("export"):
            made = None
            if settings.writes_weights or self._is_shared:  # a pass of ranks that share the model needs all of them
                with self._adapters.merged() if self._adapters else nullcontext():
                    made = probe(self.model, self._dtype, float32_head=self._config.fp32_lm_head)
            written = group.each(lambda: self._write_weights(directory, writers))
        if not settings.writes_weights:
            return None
        write_index(directory)
        return Exported(made, {name: digest for rank in writers.of_pod for name, digest in written[rank].items()})

    def save(self, step: int, keep: int) -> None:
        """Write this rank's part of the state; rank 0 completes the checkpoint, durable for every rank on return."""
        draft = self._group.led(lambda: self._checkpoints.begin(step))
        try:
            if origin := self._origin:
                self._group.led(lambda: (draft / ORIGIN).write_text(origin.model_dump_json(indent=2)))
            with self._group.together("save"):
                self._write_checkpoint(draft)
            mine = f"__{self._group.rank}_*"
            digests = self._group.each(lambda: digests_of(sorted(draft.glob(mine))))
            known = {name: digest for of_rank in digests for name, digest in of_rank.items()}
            self._group.led(
                lambda: self._checkpoints.finish(
                    draft, step, keep=keep, digests=known, prompt_position=self._prompt_position
                )
            )
        except (OSError, Refused):  # no rank writes into the draft any more
            if self._group.rank == 0:
                self._checkpoints.abandon(draft)
            raise

    def replay_from(self) -> int:
        return self._checkpoints.oldest()

    def saved(self) -> int:
        return self._saved

    def mirror(self, step: int) -> None:
        assert self._mirrors is not None, "asked of ranks that report canMirror"
        self._mirrors.keep(step, self._to_keep(), prompt_position=self._prompt_position)

    def _to_keep(self) -> dict[str, Tensor]:
        """Return all that outlives a process, by name, in place. The number of updates is a copy."""
        return self._state.saved() | {UPDATES: torch.tensor(self._state.updates)}

    def _read_batch(self, step: int, path: Path) -> tuple[Shard, list[_Work]]:
        """Read this rank's shard and divide it, as agreed with the others. Raises Refused on every rank or on none."""
        config, is_scored = self._config, self._has_reference and not self._keeps_reference
        shard, shares = read_together(path, self._group, step=step, use=self._use, is_scored=is_scored)
        minibatches = deal_minibatches(shares, count=config.minibatches, seed=config.seed * 1_000_003 + step)
        work = [
            _Work(
                minibatch.loss_tokens if config.average == "Tokens" else minibatch.samples,
                [*micro_batches(shard, minibatch, tokens=config.micro_batch_tokens, packing=config.packing)],
            )
            for minibatch in minibatches
            if minibatch.teaches
        ]
        if self._is_shared:
            passes = self._group.gather([len(minibatch.micro_batches) for minibatch in work])
            for minibatch, most in zip(work, map(max, zip(*passes, strict=True)), strict=True):
                minibatch.micro_batches.extend([None] * (most - len(minibatch.micro_batches)))
        return shard, work

    def _weight(self, shard: Shard, micro: MicroBatch) -> Tensor:
        """Return the weight of each trained token in the sum over tokens."""
        match self._config.average:
            case "Tokens":
                return torch.ones(len(micro.sample))
            case "Sequences":
                return 1 / shard.loss_tokens[micro.sample].float()
            case "Limit":
                return torch.full((len(micro.sample),), 1 / self._limit)

    def _logp(self, shard: Shard, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """Compute log-probability and entropy of a micro-batch's trained tokens, in the order of `micro.tokens`."""
        temperature = shard.header.temperature
        return logp_and_entropy(
            self.model, shard, micro, temperature=temperature, device=self._device, dtype=self._dtype,
            float32_head=self._config.fp32_lm_head,
        )  # fmt: skip

    def _replaying(self, shard: Shard, micro: MicroBatch) -> AbstractContextManager[None]:
        """Return a context for passes in which tokens go to the experts that the engine chose, as far as is known."""
        if self._replay is None or shard.experts is None:
            return nullcontext()
        places = micro.places.flatten()
        chosen = shard.experts[places.clamp(min=0)].masked_fill((places < 0)[:, None], -1)
        return self._replay.of(chosen.to(self._device))

    def _keep_up(self, *, with_gradient: bool) -> None:
        """Make a pass over one token that teaches nothing: peers need this rank's part of every layer."""
        nothing = torch.zeros(1, 1, dtype=torch.int64, device=self._device)
        with torch.set_grad_enabled(with_gradient), computing_in(self._dtype, self.model, self._device):
            logits = self.model(input_ids=nothing, use_cache=False).logits
        if with_gradient:
            logits.backward(torch.zeros_like(logits))

    def _sum_and_clip_gradients(self) -> float:
        """Return the norm of the whole gradient before clipping, the same on every rank; not finite as it may be."""
        gradients = self._state.gradients
        if not self._trains_parts:  # otherwise the passes sum each rank's part
            self._group.sum_in_place(gradients)
        of_rank = self._state.gradient_norm()
        if self._trains_parts:
            self._group.sum_in_place(of_rank.square_())
            of_rank.sqrt_()
        norm = float(of_rank)
        if norm > self._config.gradient_clip:
            gradients.mul_(self._config.gradient_clip / norm)
        return norm

    def _skip_update(self, step: int, norm: float, tally: StepTally) -> None:
        """Leave weights and optimizer state as they are. Raises Diverged if the job wants none or no more skipped."""
        config = self._config
        self._skipped_in_a_row += 1
        advice = "lower learningRate or importanceCap in spec.trainer.config"
        if config.non_finite_gradient == "Fail":
            raise Diverged(f"gradient norm of step {step} is {norm}: {advice}, or set nonFiniteGradient to Skip there")
        if self._skipped_in_a_row > config.max_skipped_updates:
            raise Diverged(
                f"gradient norm of step {step} is {norm}, after {config.max_skipped_updates} updates in a row that "
                f"were skipped for the same (maxSkippedUpdates): {advice}"
            )
        self._state.gradients.zero_()
        tally.skipped += 1
        log(_LOG, "update skipped", logging.WARNING, step=step, reason=f"its gradient norm is {norm}")

    def _check_budget(self) -> bool:
        """Return whether activations are to be computed again: as the job wants it, or where keeping them is tight.

        Raises ConfigError if a step never fits, before anything takes memory.
        """
        is_gpu = self._device.type == "cuda"
        device_has = torch.cuda.get_device_properties(self._device).total_memory if is_gpu else None
        host_has, forecast = host_memory(), self._forecast
        recomputes, budget = forecast.choose(device_has=device_has, host_has=host_has)
        log(
            _LOG,
            "memory of a step estimated",
            device_bytes=budget.device,
            reference_bytes=budget.reference,
            device_has_bytes=device_has,
            pass_bytes=budget.one_pass,
            pass_tokens=forecast.pass_tokens,
            activation_checkpointing=recomputes,
            pod_host_bytes=budget.host,
            host_has_bytes=host_has,
            exports_bytes=budget.exports,
            exports_have_bytes=forecast.exports_have if budget.exports else None,
            mirrors_bytes=budget.mirrors,
            mirrors_have_bytes=forecast.mirrors_have,
        )
        budget.refuse_what_never_fits(
            device_has=device_has,
            host_has=host_has,
            exports_have=forecast.exports_have,
            mirrors_have=forecast.mirrors_have,
        )
        return recomputes

    @contextmanager
    def _explaining_full_device(self, step: int) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise DeviceFull(f"no memory for step {step}: {self._memory_advice()}: {error}") from error

    def _memory_advice(self) -> str:
        config, vocabulary = self._config, int(self.model.config.get_text_config().vocab_size)
        state = self._state.size_bytes
        logits = config.micro_batch_tokens * vocabulary * (1 if isinstance(self.model.forward, ScoringForward) else 16)
        lower = f"lower microBatchTokens (it is {config.micro_batch_tokens})"
        if not self._recomputes:
            lower += " or set activationCheckpointing"
        return (
            f"the trainer's state is {state / 2**30:.1f} GiB, the logits of a pass take up to "
            f"{logits / 2**30:.1f} GiB: {lower}"
        )

    def _write_weights(self, directory: Path, writers: Writers) -> Mapping[str, Digest]:
        return write_files(
            self.model,
            directory,
            origin=self._settings.model,
            dtype=self._dtype,
            writers=writers,
            beside=self._beside,
            adapters=self._adapters,
            file_bytes=self.file_bytes,
        )

    def _write_checkpoint(self, directory: Path) -> None:
        write_parts(self._to_keep(), directory)

    def _read_checkpoint(self, directory: Path) -> None:
        """Read this rank's part. Raises ConfigError if the checkpoint is of another model or optimizer."""
        file = directory / ORIGIN
        text = self._group.led(lambda: file.read_text() if file.is_file() else None)
        if text is not None and self._origin is not None:
            self._origin.require_same(AdapterOrigin.model_validate_json(text), checkpoint=directory.name)
        parts = self._to_keep()
        stored = self._group.led(lambda: shapes_in(directory))
        wanted = {name: tuple(tensor.shape) for name, tensor in parts.items()}
        if differing := sorted(name for name in stored.keys() | wanted.keys() if stored.get(name) != wanted.get(name)):
            first = differing[0]
            raise ConfigError(
                f"checkpoint {directory} is of another model or optimizer, {len(differing)} tensors differ, first "
                f"{first} ({stored.get(first, 'none')} there, {wanted.get(first, 'none')} here): set spec.model, and "
                "optimizer and lora in spec.trainer.config, as they were when it was written"
            )
        with self._group.together("load"):
            read_parts(parts, directory)
        self._state.updates = int(parts[UPDATES])

    def _find_origin(self, lora: LoraConfig) -> AdapterOrigin:
        """Return what the adapters belong to. Each rank hashes some of the model's files, which were just read."""
        mine = files_of_model(self._settings.model)[self._group.rank :: self._group.size]
        digests = self._group.each(lambda: digests_of(mine))
        base = {name: digest for of_rank in digests for name, digest in of_rank.items()}
        return AdapterOrigin(rank=lora.rank, alpha=lora.alpha, base=base)

    def _passing(self, what: str) -> AbstractContextManager[None]:
        """Return a context for passes through the model, each of which needs the peers if they share it."""
        return self._group.together(what) if self._is_shared else nullcontext()


def _computed(shard: Shard, work: Sequence[_Work]) -> Tensor:
    """Return which of the shard's tokens the passes over `work` compute: bool [T]."""
    computed = torch.zeros_like(shard.loss_mask)
    for minibatch in work:
        for micro in minibatch.micro_batches:
            if micro is not None:
                computed[micro.tokens] = True
    return computed
