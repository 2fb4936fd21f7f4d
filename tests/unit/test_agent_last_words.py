"""These tests show what is reported at the end of a process that may have seen prompts and responses."""

from __future__ import annotations

from colocated_rl_agent.lanes.last_words import last_words

TRACEBACK = [
    "Traceback (most recent call last):",
    '  File "/opt/train.py", line 12, in <module>',
    "    main()",
    '  File "/opt/loop.py", line 7, in train',
    "    raise ValueError(text)",
    "ValueError: my secret",
    "of two lines",
]


def test_before_anybody_asked_it_for_anything_its_last_lines_say_what_is_wrong() -> None:
    words = last_words(["usage: sglang", "sglang: error:", "unrecognized arguments: --turbo"], was_asked=False)
    assert "last words: usage: sglang | sglang: error: | unrecognized arguments: --turbo" == words


def test_afterwards_only_type_and_place_of_its_last_exception_are_reported() -> None:
    """The last line of a traceback is the exception's message, which quotes what it was about."""
    words = last_words(TRACEBACK, was_asked=True)
    assert "ValueError at /opt/loop.py:7; the log of container gpu has its last words" == words


def test_the_newest_traceback_counts() -> None:
    second = ['  File "/opt/save.py", line 3, in save', "torch.OutOfMemoryError: CUDA out of memory"]
    assert last_words([*TRACEBACK, *second], was_asked=True).startswith("torch.OutOfMemoryError at /opt/save.py:3;")


def test_what_is_no_traceback_is_not_told() -> None:
    words = last_words(["prompt: my secret", "ValueError: my secret"], was_asked=True)
    assert "it left no traceback; the log of container gpu has its last words" == words
