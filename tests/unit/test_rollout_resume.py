"""Segments of one response: what is read from an engine, and how it becomes one completion."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colocated_rl_api.rungs import WeightVersion
from colocated_rl_rollout.rules.resume import (
    NO_EXPERTS,
    GarbledAnswer,
    UnversionedAnswer,
    cut,
    exhausted,
    finish_of,
    join,
    join_all,
    join_experts,
    read_answer,
    read_experts,
    read_preemptions,
    remaining,
    stopped_at,
)
from colocated_rl_rollout.rules.samples import (
    NO_TOKENS,
    Finish,
    Span,
    Tokens,
)

END = 2
SPAN = {"version": "3-1", "start": 0, "end": 2}


def answer(ids: list[int], *, reason: dict[str, Any] | None, **meta: Any) -> dict[str, Any]:
    return {
        "text": "",
        "output_ids": ids,
        "meta_info": {
            "finish_reason": reason,
            "weight_version": "3-1",
            "output_token_logprobs": [[-0.5 - number / 8, number, None] for number in ids],
            **meta,
        },
    }


def tokens(*parts: tuple[int | None, int]) -> Tokens:
    """(step, count) of each span, a step of None without a version; ids count up from 10."""
    spans, start = [], 0
    for step, count in parts:
        spans.append(Span(None if step is None else WeightVersion(step, 1), start, start + count))
        start += count
    return Tokens(np.arange(10, 10 + start, dtype=np.int32), -np.ones(start, np.float32), tuple(spans))


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ({"type": "stop", "matched": END}, Finish.STOP),
        ({"type": "length", "length": 3}, Finish.LENGTH),
        ({"type": "abort", "message": "Aborted", "status_code": None}, None),
        ({"type": "abort", "message": "Abort in waiting queue"}, None),
        ({"type": "aborted"}, None),
        (None, None),  # the last state that was read from an engine that died
    ],
)
def test_finish_reasons_come_down_to_three(reason: dict[str, Any] | None, expected: Finish | None) -> None:
    read, ending = read_answer(answer([5, 6, END], reason=reason))
    assert expected is ending
    assert [5, 6, END] == read.ids.tolist()
    assert [-1.125, -1.25, -0.75] == read.logp.tolist()


@pytest.mark.parametrize(("said", "count"), [(3, 3), (1, 1), (0, 0), (-1, 0), (None, 0), ("3", 0)])
def test_preemptions_are_as_many_as_the_engine_says(said: Any, count: int) -> None:
    assert count == read_preemptions({"meta_info": {"num_retractions": said}})
    assert 0 == read_preemptions({"meta_info": {}})


def test_a_chunk_without_spans_was_made_by_the_version_it_names() -> None:
    read, _ = read_answer(answer([5, 6], reason=None))
    assert (Span(WeightVersion(3, 1), 0, 2),) == read.spans


def test_spans_are_taken_as_the_engine_has_them() -> None:
    spans = [{"version": "2-1", "start": 0, "end": 1}, {"version": "3-1", "start": 1, "end": 3}]
    read, _ = read_answer(answer([5, 6, END], reason={"type": "stop"}, weight_versions=spans))
    assert (Span(WeightVersion(2, 1), 0, 1), Span(WeightVersion(3, 1), 1, 3)) == read.spans


def test_an_abort_before_the_first_token_is_an_empty_segment() -> None:
    meta = {"weight_versions": [{"version": "3-1", "start": 0, "end": 0}]}
    read, ending = read_answer(answer([], reason={"type": "abort"}, **meta))
    assert (0, (), None) == (len(read), read.spans, ending)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"output_token_logprobs": [[-1.0, 5, None]]}, id="a log-probability is missing"),
        pytest.param({"output_token_logprobs": [[-1.0, 5, None], [-1.0, 7, None]]}, id="of another token"),
        pytest.param({"output_token_logprobs": [[float("nan"), 5, None], [-1.0, 6, None]]}, id="not a number"),
        pytest.param({"output_token_logprobs": [[None, 5, None], [-1.0, 6, None]]}, id="null"),
        pytest.param({"output_token_logprobs": [[0.5, 5, None], [-1.0, 6, None]]}, id="a probability above 1"),
        pytest.param({"output_token_logprobs": "no"}, id="of another shape"),
        pytest.param({"weight_version": 3}, id="a version of another shape"),
        pytest.param({"weight_versions": [{"version": "3-1", "start": 0, "end": 1}]}, id="a token in no span"),
        pytest.param({"weight_versions": [{"version": "3-1", "start": 1, "end": 2}]}, id="a gap"),
        pytest.param({"weight_versions": [SPAN, SPAN | {"start": 1}]}, id="a token with two versions"),
        pytest.param({"weight_versions": [SPAN, SPAN | {"start": 3}]}, id="a span that ends before it starts"),
        pytest.param({"finish_reason": {"type": "retracted"}}, id="a reason that nobody knows"),
        pytest.param({"finish_reason": "stop"}, id="a reason of another shape"),
    ],
)
def test_an_answer_that_contradicts_itself_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(GarbledAnswer):
        read_answer(
            answer([5, 6], reason=change.pop("finish_reason", {"type": "abort"}), **change), accepts_unversioned=True
        )


NAMELESS = SPAN | {"version": "default", "start": 1}


@pytest.mark.parametrize(
    ("meta", "spans"),
    [
        pytest.param({"weight_version": None}, (Span(None, 0, 2),), id="none"),
        pytest.param({"weight_version": "default"}, (Span(None, 0, 2),), id="the engine's own"),
        pytest.param(
            {"weight_versions": [SPAN | {"end": 1}, NAMELESS]},
            (Span(WeightVersion(3, 1), 0, 1), Span(None, 1, 2)),
            id="of the second token",
        ),
    ],
)
def test_tokens_without_a_version_are_read_where_the_job_accepts_them_and_stay_apart(
    meta: dict[str, Any], spans: tuple[Span, ...]
) -> None:
    said = answer([5, 6], reason={"type": "stop"}, **meta)
    with pytest.raises(UnversionedAnswer, match=r"delete the engine's pod, .* rollout.unversionedTokens: Accept"):
        read_answer(said)
    read, _ = read_answer(said, accepts_unversioned=True)
    assert (spans, sum(span.end - span.start for span in spans if not span.version)) == (read.spans, read.unversioned)


@pytest.mark.parametrize(
    "change",
    [
        {"output_token_logprobs": [[-1.0, "my secret", None]]},
        {"output_token_logprobs": [["my secret", 5, None], [-1.0, 6, None]]},
        {"weight_version": "my secret"},
        {"weight_versions": [{"version": "my secret", "start": 0, "end": 2}]},
        {"finish_reason": {"type": "my secret"}},
    ],
)
def test_what_is_reported_of_a_garbled_answer_quotes_nothing_of_it(change: dict[str, Any]) -> None:
    """It is logged: the messages of Python's own errors quoted what the engine had generated."""
    with pytest.raises(GarbledAnswer) as garbled:
        read_answer(answer([5, 6], reason=change.pop("finish_reason", {"type": "abort"}), **change))
    assert "secret" not in str(garbled.value)


def test_spans_that_reach_beyond_the_tokens_are_refused_with_both_numbers() -> None:
    spans = [SPAN | {"end": 1}, SPAN | {"start": 1, "end": 3}]
    with pytest.raises(GarbledAnswer, match="cover 3 tokens of 2,"):
        read_answer(answer([5, 6], reason=None, weight_versions=spans))


def test_a_span_without_tokens_is_none() -> None:
    read, _ = read_answer(answer([5, 6], reason=None, weight_versions=[SPAN | {"version": "2-1", "end": 0}, SPAN]))
    assert (Span(WeightVersion(3, 1), 0, 2),) == read.spans


def test_the_first_token_of_a_tokenizer_and_a_rounded_certainty_are_taken() -> None:
    read, _ = read_answer(answer([0], reason=None, output_token_logprobs=[[1e-4, 0, None]]))
    assert [0] == read.ids.tolist()


def test_a_token_that_no_tokenizer_has_is_refused() -> None:
    """It was kept, ended the controller when it was to be made text, and did so again after each restart."""
    with pytest.raises(GarbledAnswer, match="below 0"):
        read_answer(answer([5, -1], reason={"type": "stop"}))


@pytest.mark.parametrize("body", [{}, {"meta_info": None}, {"output_ids": [1]}, {"meta_info": {"finish_reason": None}}])
def test_an_answer_without_its_parts_is_refused(body: dict[str, Any]) -> None:
    if body == {"meta_info": {"finish_reason": None}}:
        assert 0 == len(read_answer(body)[0])  # nothing was generated, and nothing is claimed
    else:
        with pytest.raises(GarbledAnswer):
            read_answer(body)


def experts(*numbers: int) -> str:
    return base64.b64encode(np.array(numbers, "<i4").tobytes()).decode()


def test_experts_are_taken_as_the_engine_has_them() -> None:
    read = read_experts({"meta_info": {"routed_experts": experts(1, 2, 3, 4, 70_000, 6)}}, rows=2)
    assert [[1, 2, 3], [4, 70_000, 6]] == read.tolist()
    assert np.int32 == read.dtype.type
    assert 0 == len(read_experts({"meta_info": {}}, rows=2)), "an engine was lost before it said any"


@pytest.mark.parametrize(
    "reported", [experts(1, 2, 3), experts(), "AAA", "AAAA", "é", 7, ["AAAA"], f"!{experts(1, 2)}"]
)
def test_experts_of_other_tokens_are_refused(reported: Any) -> None:
    with pytest.raises(GarbledAnswer):
        read_experts({"meta_info": {"routed_experts": reported}}, rows=2)


def test_tokens_of_one_response_have_as_many_experts_each() -> None:
    answer = {"meta_info": {"routed_experts": experts(1, 2, 3, 4)}}
    assert (2, 2) == read_experts(answer, rows=2, width=2).shape
    assert (1, 4) == read_experts(answer, rows=1, width=4).shape
    for before in (1, 3):
        with pytest.raises(GarbledAnswer, match=f"have 2 routed experts each, and those before them {before}"):
            read_experts(answer, rows=2, width=before)


def test_experts_of_further_tokens_follow_those_before() -> None:
    first, more = np.array([[1, 2]], np.int32), np.array([[3, 4], [5, 6]], np.int32)
    assert [[1, 2], [3, 4], [5, 6]] == join_experts(first, more).tolist()
    assert [[1, 2]] == join_experts(join_experts(NO_EXPERTS, first), NO_EXPERTS).tolist()
    assert (0, 0) == join_experts(NO_EXPERTS, NO_EXPERTS).shape


def test_an_end_before_the_first_token_is_refused() -> None:
    with pytest.raises(GarbledAnswer, match="before its first token"):
        read_answer(answer([], reason={"type": "stop"}))


def test_the_only_segment_of_a_response_is_not_copied() -> None:
    segment = tokens((1, 2))
    joined = join(NO_TOKENS, segment)
    assert (True, True) == (joined.ids is segment.ids, joined.logp is segment.logp)


def test_segments_of_one_version_become_one_span() -> None:
    joined = join(join(NO_TOKENS, tokens((1, 2))), tokens((1, 3), (2, 1)))
    assert (Span(WeightVersion(1, 1), 0, 5), Span(WeightVersion(2, 1), 5, 6)) == joined.spans
    assert [10, 11, 10, 11, 12, 13] == joined.ids.tolist()


def test_spans_with_other_tokens_between_them_stay_two() -> None:
    """The words of a tool have no version, and stand at the end of the first segment."""
    first = replace(tokens((1, 3)), spans=(Span(WeightVersion(1, 1), 0, 2),))
    joined = join(first, tokens((1, 2)))
    assert (Span(WeightVersion(1, 1), 0, 2), Span(WeightVersion(1, 1), 3, 5)) == joined.spans


@pytest.mark.parametrize(
    ("length", "spans"),
    [
        (0, []),
        (1, [(1, 0, 1)]),
        (2, [(1, 0, 2)]),
        (3, [(1, 0, 2), (2, 2, 3)]),
        (5, [(1, 0, 2), (2, 2, 4), (3, 4, 5)]),
        (9, [(1, 0, 2), (2, 2, 4), (3, 4, 5)]),
    ],
)
def test_what_is_cut_off_takes_its_spans_with_it(length: int, spans: list[tuple[int, int, int]]) -> None:
    short = cut(tokens((1, 2), (2, 2), (3, 1)), length)
    assert [(Span(WeightVersion(step, 1), start, end)) for step, start, end in spans] == list(short.spans)
    assert [10, 11, 12, 13, 14][:length] == short.ids.tolist()
    assert len(short) == len(short.logp)


@given(st.lists(st.tuples(st.none() | st.integers(0, 4), st.integers(0, 5)), max_size=10))
def test_whatever_is_joined_each_token_keeps_its_version(segments: list[tuple[int | None, int]]) -> None:
    whole = NO_TOKENS
    for segment in segments:
        whole = join(whole, tokens(segment))
    at_once = join_all(tokens(segment) for segment in segments)
    assert (whole.ids.tolist(), whole.spans) == (at_once.ids.tolist(), at_once.spans)
    expected = [step for step, count in segments for _ in range(count)]
    made_by = [span.version and span.version.step for span in whole.spans for _ in range(span.start, span.end)]
    assert expected == made_by
    assert len(expected) == len(whole) == len(whole.logp)
    assert whole.oldest_step == min((step for step in expected if step is not None), default=None)
    assert whole.unversioned == expected.count(None)
    assert all(one.version != other.version for one, other in zip(whole.spans, whole.spans[1:], strict=False))


@pytest.mark.parametrize(
    ("last", "attempt", "limit", "expected"),
    [
        (7, Finish.STOP, 9, Finish.STOP),
        (7, Finish.LENGTH, 2, Finish.LENGTH),
        (7, None, 9, None),
        (END, None, 9, Finish.STOP),  # hidden by the abort
        (7, None, 2, Finish.LENGTH),
        (END, Finish.LENGTH, 2, Finish.STOP),  # hidden by the limit
        (7, Finish.LENGTH, 9, Finish.LENGTH),  # a limit of the engine's own
        (7, None, 1, Finish.LENGTH),  # that was lowered meanwhile
    ],
)
def test_an_end_is_found_whatever_hides_it(
    last: int, attempt: Finish | None, limit: int, expected: Finish | None
) -> None:
    for before in ([5], [5, END, 6]):  # an end token within a response is none, where it is forbidden to end there
        ids = np.array([*before, last], np.int32)
        whole = Tokens(ids, -np.ones(len(ids), np.float32), (Span(WeightVersion(0, 1), 0, len(ids)),))
        found = finish_of(whole, attempt, limit=limit + len(before) - 1, end_ids={END})
        assert expected is found


def test_nothing_has_not_ended() -> None:
    assert finish_of(NO_TOKENS, None, limit=3, end_ids={END}) is None


def test_the_budget_holds_over_all_attempts() -> None:
    assert 5 == remaining(NO_TOKENS, limit=5)
    assert 2 == remaining(join(tokens((0, 2)), tokens((1, 1))), limit=5)


LIMIT = 100


@pytest.mark.parametrize(
    ("attempts", "idle_attempts", "resent", "expected"),
    [
        (63, 15, 32 * LIMIT - 1, None),
        (64, 0, 0, "TooManyAttempts"),
        (65, 0, 0, "TooManyAttempts"),
        (0, 16, 0, "NoProgress"),
        (0, 17, 0, "NoProgress"),
        (0, 0, 32 * LIMIT, "TooManyTokensResent"),
        (0, 0, 32 * LIMIT + 1, "TooManyTokensResent"),
    ],
)
def test_a_response_is_given_up_at_each_bound_and_not_before(
    attempts: int, idle_attempts: int, resent: int, expected: str | None
) -> None:
    found = exhausted(attempts=attempts, idle_attempts=idle_attempts, resent=resent, limit=LIMIT)
    assert expected == (found and found[0])


@pytest.mark.parametrize(
    ("stops", "expected"), [((), None), (("x",), None), (("c",), 3), (("bc", "e"), 3), (("e",), 5), (("a", "x"), 1)]
)
def test_a_stop_text_is_found_with_the_token_that_completes_it(stops: tuple[str, ...], expected: int | None) -> None:
    assert expected == stopped_at(
        np.arange(5, dtype=np.int32), stops, lambda ids: "".join("abcde"[each] for each in ids)
    )


@given(st.text("ab", min_size=1, max_size=40), st.lists(st.text("ab", min_size=1, max_size=3), max_size=3))
def test_a_stop_text_is_found_wherever_it_stands(text: str, stops: list[str]) -> None:
    ends = [size for size in range(len(text) + 1) if any(stop in text[:size] for stop in stops)]
    assert next(iter(ends), None) == stopped_at(
        np.arange(len(text), dtype=np.int32), stops, lambda ids: "".join(text[each] for each in ids)
    )


def test_a_stop_text_at_the_end_of_a_long_response_is_found_by_a_few_looks() -> None:
    """Each decodes the response: there were as many as its length has digits in base 2, and everybody waited."""
    decoded: list[int] = []

    def text_of(ids: list[int]) -> str:
        decoded.append(len(ids))
        return "".join(map(chr, ids))

    text = "a" * 32760 + "stop"
    assert len(text) == stopped_at(np.array([*map(ord, text)], np.int32), ("stop",), text_of)
    assert len(decoded) <= 4
