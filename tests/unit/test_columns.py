"""Answers in columns: what goes in comes out, and what is no answer is neither packed nor read."""

from __future__ import annotations

import array
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colocated_rl_api.columns import pack, unpack

TOKENS = st.lists(st.tuples(st.floats(-(2.0**100), 0, width=32), st.integers(-(2**31), 2**31 - 1)), max_size=40)


def answer(tokens: list[tuple[float, int]], **meta: Any) -> dict[str, Any]:
    scored = [[logp, token, None] for logp, token in tokens]
    return {
        "text": "said",
        "output_ids": [token for _, token in tokens],
        "meta_info": {"finish_reason": {"type": "abort"}, "output_token_logprobs": scored, **meta},
    }


@given(tokens=TOKENS, more=st.dictionaries(st.text(max_size=8), st.integers() | st.text(max_size=8), max_size=3))
def test_an_answer_comes_out_as_it_went_in_but_for_its_text(
    tokens: list[tuple[float, int]], more: dict[str, Any]
) -> None:
    given_ = answer(tokens, **{f"x-{name}": value for name, value in more.items()})
    packed = pack(given_)
    assert packed is not None
    read = unpack(packed)
    assert [token for _, token in tokens] == array.array("i", read.ids.tobytes()).tolist()
    assert [logp for logp, _ in tokens] == array.array("f", read.logp.tobytes()).tolist()
    expected = {name: value for name, value in given_["meta_info"].items() if name != "output_token_logprobs"}
    assert {"meta_info": expected} == read.head


@pytest.mark.parametrize(
    "change",
    [
        {"output_ids": [1]},
        {"output_ids": [1, 3]},
        {"output_ids": None},
        {"meta_info": None},
        {"meta_info": {"output_token_logprobs": None}},
        {"meta_info": {"output_token_logprobs": [[-1.0, 1, None], [None, 2, None]]}},
        {"meta_info": {"output_token_logprobs": [[-1.0, 1], [-1.0]]}},
        {"meta_info": {"output_token_logprobs": [["-1.0", 1, None], [-1.0, 2, None]]}},
        {"meta_info": {"output_token_logprobs": {"a": 1}}},
        {"output_ids": [1, 2**31], "meta_info": {"output_token_logprobs": [[-1.0, 1], [-1.0, 2**31]]}},
    ],
)
def test_what_has_not_one_log_probability_for_each_token_is_left_to_its_reader(change: dict[str, Any]) -> None:
    assert None is pack(answer([(-1.0, 1), (-1.0, 2)]) | change)


@pytest.mark.parametrize("cut", [1, 4, 7, 8, 9, 40])
def test_an_answer_that_is_cut_off_is_not_read(cut: int) -> None:
    packed = pack(answer([(-1.0, 1), (-2.0, 2)]))
    assert packed is not None
    for data in (packed[:-cut], packed + b"x" * cut, packed[cut:]):
        with pytest.raises(ValueError, match=r"sizes|bytes are not|expected|control|invalid"):
            unpack(data)


@pytest.mark.parametrize("head", [b"[]", b"1", b"{", b"\xff"])
def test_a_head_that_is_no_object_is_refused(head: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the parser's words, or ours
        unpack((0).to_bytes(4, "little") + len(head).to_bytes(4, "little") + head)


def test_a_token_takes_eight_bytes_whatever_its_text() -> None:
    tokens = [(-0.123456789, 150_000 + number) for number in range(1000)]
    as_json = json.dumps(answer(tokens)).encode()
    packed = pack(answer(tokens))
    assert packed is not None
    assert 8000 < len(packed) < 8200 < len(as_json) / 4
