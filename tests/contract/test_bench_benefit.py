"""The workload of the benchmark of whole jobs: whoever samples from its model gets the lengths that it states."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Qwen3ForCausalLM

from bench.benefit.judge import LONGEST_S, SHORTEST_S, verdict
from bench.benefit.workload import END, FIRST, START, STATES, VOCABULARY, WORDS, question, write_model
from bench.traces import LENGTHS, MEAN


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def chances(model: Path, *tokens: int) -> torch.Tensor:
    """Probability of each next token, float32."""
    with torch.no_grad():
        logits = Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float32)(torch.tensor([tokens])).logits
    return torch.softmax(logits[0, -1], dim=-1)


def words_of(number: int) -> slice:
    return slice(FIRST + WORDS * number, FIRST + WORDS * (number + 1))


def test_a_response_begins_in_a_state_and_ends_as_often_as_that_has_it(model: Path) -> None:
    """Whatever stood before: attention adds nothing."""
    first = chances(model, 7, 100, START)
    for number, state in enumerate(STATES):
        assert state.share == pytest.approx(float(first[words_of(number)].sum()), rel=1e-3)
        for before in ((), (START, 5), (150,) * 20):
            following = chances(model, *before, FIRST + WORDS * number)
            assert 1 / state.mean == pytest.approx(float(following[END]), rel=1e-3)
            assert 1 - 1 / state.mean == pytest.approx(float(following[words_of(number)].sum()), rel=1e-3)


def test_lengths_are_a_sixteenth_of_those_of_a_reasoning_model() -> None:
    """Mean, the longest tenth and the longest hundredth, within a fifth: what waiting for the longest costs."""
    assert MEAN / 16 == pytest.approx(sum(state.share * state.mean for state in STATES), rel=0.2)
    for rank in (0.9, 0.99):
        length = LENGTHS[int(rank * len(LENGTHS))] / 16
        longer = sum(state.share * (1 - 1 / state.mean) ** length for state in STATES)
        assert 1 - rank == pytest.approx(longer, rel=0.2)


def test_prompts_are_what_the_tokenizer_reads_and_end_where_responses_begin(model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    for number in (0, 1, 511):
        messages = [{"role": "user", "content": question(number)}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert START == ids[-1]
        assert all(FIRST <= one < VOCABULARY for one in ids[:-1])
        assert ids == tokenizer(f"{question(number)} go")["input_ids"]


def test_a_response_is_always_worth_the_same_after_the_same_time() -> None:
    found = [verdict(f"w{number} w{number + 1}") for number in range(2000)]
    assert found == [verdict(f" w{number} w{number + 1}") for number in range(2000)]
    assert 0.45 < sum(reward for reward, _ in found) / len(found) < 0.55
    waits = sorted(wait_s for _, wait_s in found)
    assert SHORTEST_S <= waits[0]
    assert waits[-1] == LONGEST_S
    assert 0.45 == pytest.approx(waits[1000], rel=0.1)
