"""Every job is read, and nothing taken of what is too deep for Python or too large for its memory."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colocated_rl_api.bounded_json import (
    ALONE,
    LISTED,
    MOST_CHARACTERS,
    MOST_LEVELS,
    MOST_VALUES,
    REFUSED,
    WATCHED,
    read_objects,
)

DEEP = "[" * 5000 + "]" * 5000
LARGE = json.dumps("a" * MOST_CHARACTERS)
MANY = json.dumps([1] * MOST_VALUES)
JOB = '{"metadata": {"name": "a"}, "spec": {"steps": 3, "trainer": {"config": {"x": %s}}, "replicas": 2}}'
PARTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.sampled_from('ab\\"[]{}é\n')),
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.text(st.sampled_from('a"[{\\')), parts, max_size=3),
    max_leaves=12,
)


def around(job: str, level: int) -> str:
    return {ALONE: job, WATCHED: f'{{"type": "ADDED", "object": {job}}}', LISTED: f'{{"items": [{job}, {job}]}}'}[level]


def objects(found: Any, level: int) -> list[Any]:
    return [found] if level == ALONE else [found["object"]] if level == WATCHED else list(found["items"])


@pytest.mark.parametrize("excess", [DEEP, LARGE, MANY], ids=["deep", "large", "many"])
@pytest.mark.parametrize("level", [ALONE, WATCHED, LISTED])
def test_a_field_that_nobody_could_use_is_replaced_and_all_else_is_read(level: int, excess: str) -> None:
    for job in objects(read_objects(around(JOB % excess, level), level=level), level):
        assert {"metadata": {"name": "a"}, "spec": {"steps": 3, "trainer": REFUSED, "replicas": 2}} == job


@pytest.mark.parametrize("level", [ALONE, WATCHED, LISTED])
def test_excess_of_metadata_is_empty_and_of_its_kind(level: int) -> None:
    """Words stood there, and whoever looked for a label in them failed: its job was never acted on, without a word."""
    labels = json.dumps({str(number): "" for number in range(MOST_VALUES + 2)})
    many = json.dumps(["a"] * (MOST_VALUES + 2))
    job = f'{{"metadata": {{"name": "a", "labels": {labels}, "finalizers": {many}}}, "spec": {{"labels": {labels}}}}}'
    for found in objects(read_objects(around(job, level), level=level), level):
        assert {"metadata": {"name": "a", "labels": {}, "finalizers": []}, "spec": {"labels": REFUSED}} == found


@given(part=PARTS, other=PARTS)
def test_whatever_else_is_in_an_object_is_what_it_was(part: Any, other: Any) -> None:
    """Beside something that is not read, too: brackets and quotes in strings are none."""
    text = f'{{"metadata": {json.dumps([part])}, "spec": {{"a": {json.dumps(other)}, "b": {DEEP}, "c": {{"d": []}}}}}}'
    found = read_objects(text, level=ALONE)
    assert {"metadata": [part], "spec": {"a": other, "b": REFUSED, "c": {"d": []}}} == found


def test_as_many_levels_as_the_bound_are_read() -> None:
    """Beside another job, which has too many."""
    inner: list[Any] = []
    for _ in range(MOST_LEVELS - 3):
        inner = [inner]
    listed = f'{{"items": [{JOB % json.dumps(inner)}, {JOB % DEEP}]}}'
    first, second = read_objects(listed, level=LISTED)["items"]
    assert {"config": {"x": inner}} == first["spec"]["trainer"]
    assert REFUSED == second["spec"]["trainer"]


@pytest.mark.parametrize("value", ["{}", "[[]]", '{"%d": 0.5}', '"%d"'])
def test_what_is_read_of_a_field_takes_little_memory(value: str) -> None:
    """A job may have four such fields, and each value is as short as it can be."""
    most = MOST_VALUES // (1 + value.count("[") + value.count("{")) - 3
    text = JOB % f"[{', '.join(value.replace('%d', str(number)) for number in range(most))}]"
    tracemalloc.start()
    try:
        job = read_objects(text, level=ALONE)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most == len(job["spec"]["trainer"]["config"]["x"])
    assert taken < 2 * 1024 * 1024


def test_what_is_no_json_is_a_value_error() -> None:
    for text in ("", "{", "[" * 5000, '{"a": "' + "x" * MOST_CHARACTERS):
        with pytest.raises(ValueError, match="line 1"):
            read_objects(text, level=ALONE)
