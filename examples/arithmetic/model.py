"""Makes the small model that the demo trains, with its tokenizer, from nothing, in about two minutes on one core.

    python -m examples.arithmetic.model DIRECTORY [--seed N]

A Qwen3 of 640,064 parameters learns from worked answers until it gets most sums right. Then it is shown mostly terse
answers, all of them correct, but beyond what it can do in its head: its usual answer is now a wrong guess, although it
still knows how to work. This is the policy that reinforcement learning improves: first by finding that working pays,
then by getting the sums right.

DIRECTORY is in Hugging Face format. It is kept as long as what made it is unchanged (`made.json`), and replaced as a
whole: a run that was interrupted leaves no half-made model.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple, TypedDict

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from examples.arithmetic import sampling, task
from examples.arithmetic.sampling import encode_prompt, exact_match, response_logp
from examples.arithmetic.task import problems

MADE = "made.json"
VOCABULARY = 384
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Report = Callable[[str], None]


@dataclass(frozen=True)
class Recipe:
    """A recipe of the warm-up. The start of the demo depends on it: held-out exact match well below 0.35, and not 0."""

    seed: int = 0
    problems: int = 4000
    batch: int = 64
    learning_rate: float = 2e-3
    worked_steps: int = 400  # at most; the schedule of the learning rate
    worked_target: float = 0.85  # of a probe, from the training side of the split; reached after about 280 steps
    terse_share: float = 0.77
    terse_steps: int = 40  # the schedule of the learning rate
    terse_steps_least: int = 30
    terse_target: float = 0.3  # of a probe, which has more short sums than the held-out questions
    terse_steps_most: int = 120
    held_out: int = 512  # questions of the final figure in made.json
    held_out_least: float = 0.05  # of them right: what never comes out right can't be reinforced
    held_out_most: float = 0.28  # below the demo's bound by three standard errors, as it asks questions of its own

    def is_met(self, held_out: float) -> bool:
        """Return whether the demo may start from a model with this held-out exact match."""
        return self.held_out_least <= held_out <= self.held_out_most


class Made(TypedDict):
    """Content of `made.json`, written with the model."""

    made_of: dict[str, object]
    held_out: float


class Demonstration(NamedTuple):
    """Token ids of a question and of two right answers to it, end token included."""

    prompt: list[int]
    worked: list[int]
    terse: list[int]


class WarmUpMissed(Exception):
    """The warm-up did not come out as the demo needs it: change the recipe or its seed."""


def ensure_model(directory: Path, recipe: Recipe, report: Report) -> float:
    """Make the model in `directory` unless it is there already. Returns its held-out exact match, sampled."""
    made_of = _made_of(recipe)
    made = _read_made(directory / MADE)
    if made and made["made_of"] == made_of:
        report(f"model: {directory} is up to date (held-out exact match {made['held_out']:.3f})")
        return made["held_out"]
    report(f"model: warming up a new one into {directory}, about two minutes")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent) as scratch:
        new = Path(scratch) / "model"
        held_out = _make(new, recipe, report)
        (new / MADE).write_text(json.dumps(Made(made_of=made_of, held_out=held_out), indent=1))
        if directory.exists():
            directory.rename(Path(scratch) / "old")
        new.rename(directory)
    _let_others_read(directory)
    return held_out


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of 384 entries, each digit one token; the fixed words of a question are one token each."""
    core = Tokenizer(models.BPE())
    words = Regex(r"\d|\n|[A-Za-z]+( [A-Za-z]+)*| ?[^\sA-Za-z0-9]|\s")
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    corpus = [text for problem in problems(500, seed=1) for text in (problem.question, problem.worked_answer)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    )
    core.train_from_iterator([*corpus, "user\n", "assistant\n"], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_random_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Qwen3 with 3 layers of 128, in float32, as torch's seed has it."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        initializer_range=0.06,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


def _make(directory: Path, recipe: Recipe, report: Report) -> float:
    torch.manual_seed(recipe.seed)
    tokenizer = make_tokenizer()
    model = make_random_model(tokenizer)
    _warm_up(model, tokenizer, recipe, report)
    held_out = exact_match(
        model, tokenizer, problems(recipe.held_out, seed=5, held_out=True), generator=torch.Generator().manual_seed(0)
    )
    report(f"model: held-out exact match {held_out:.3f} on {recipe.held_out} questions")
    if not recipe.is_met(held_out):
        raise WarmUpMissed(
            f"held-out exact match is {held_out:.3f}, not between {recipe.held_out_least} and {recipe.held_out_most} "
            f"(seed {recipe.seed}): change terse_share in examples/arithmetic/model.py"
        )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return held_out


def _warm_up(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, recipe: Recipe, report: Report) -> None:
    """Worked answers until most are right; then mostly terse ones until the usual answer is a wrong guess."""
    started = time.monotonic()
    generator = torch.Generator().manual_seed(recipe.seed)
    probe = problems(256, seed=20_000_000 + 1_000_000 * recipe.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=0.01, betas=(0.9, 0.95))
    demonstrations = _demonstrations(tokenizer, recipe)
    picker = random.Random(recipe.seed)

    def train(*, terse_share: float, learning_rate: float) -> float:
        chosen = picker.sample(demonstrations, recipe.batch)
        answers = [one.terse if picker.random() < terse_share else one.worked for one in chosen]
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        return _imitate(model, optimizer, [one.prompt for one in chosen], answers)

    def measured(stage: str, step: int, loss: float) -> float:
        share = exact_match(model, tokenizer, probe, generator=generator)
        took = time.monotonic() - started
        report(f"model: {stage} answers, step {step:3d}, loss {loss:.3f}, right {share:.2f}, {took:.0f} s")
        return share

    for step in range(1, recipe.worked_steps + 1):
        rate = recipe.learning_rate * min(1.0, step / 20) * (1 - 0.8 * step / recipe.worked_steps)
        loss = train(terse_share=0.0, learning_rate=rate)
        if step % 20 == 0 and step >= 200 and measured("worked", step, loss) >= recipe.worked_target:
            break
    for step in range(1, recipe.terse_steps_most + 1):
        rate = 0.3 * recipe.learning_rate * (1 - 0.8 * min(1.0, step / recipe.terse_steps))
        loss = train(terse_share=recipe.terse_share, learning_rate=rate)
        if step >= recipe.terse_steps_least and step % 10 == 0 and measured("terse", step, loss) <= recipe.terse_target:
            return
    raise WarmUpMissed(
        f"more than {recipe.terse_target} of the probe is right after {recipe.terse_steps_most} steps of mostly terse "
        f"answers (seed {recipe.seed}): raise terse_share in examples/arithmetic/model.py"
    )


def _imitate(
    model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, prompts: list[list[int]], answers: list[list[int]]
) -> float:
    """Take one supervised step, and return the mean loss of an answer's tokens."""
    model.train()
    logp, mask = response_logp(model, prompts, answers)
    loss = -(logp * mask).sum() / mask.sum()
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.item())


def _demonstrations(tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> list[Demonstration]:
    def answer(text: str) -> list[int]:
        return [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]

    return [
        Demonstration(encode_prompt(tokenizer, one), worked=answer(one.worked_answer), terse=answer(one.terse_answer))
        for one in problems(recipe.problems, seed=10_000_000 + 1_000_000 * recipe.seed)
    ]


def _made_of(recipe: Recipe) -> dict[str, object]:
    """Everything that the model depends on: the recipe, these modules, and the packages that compute."""
    sources = [Path(source).read_bytes() for source in (__file__, sampling.__file__, task.__file__)]
    packages = {name: version(name) for name in ("torch", "transformers", "tokenizers", "reasoning-gym")}
    return {"recipe": asdict(recipe), "sources": hashlib.sha256(b"\0".join(sources)).hexdigest(), "packages": packages}


def _read_made(file: Path) -> Made | None:
    try:
        made: Made = json.loads(file.read_text())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return None
    return made


def _let_others_read(directory: Path) -> None:
    """Pods read it under another user id."""
    directory.chmod(0o755)
    for file in directory.iterdir():
        file.chmod(0o644)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--threads", type=int, default=1, help="more do not help a model this small")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    try:
        ensure_model(args.directory, Recipe(seed=args.seed), lambda line: print(line, flush=True))
    except WarmUpMissed as missed:
        print(f"model: {missed}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
