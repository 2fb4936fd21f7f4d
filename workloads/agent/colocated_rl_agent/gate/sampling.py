"""This module finds sampling parameters that kill an engine. Pure.

SGLang passes `sampling_params` of `/generate` on as they are, and its scheduler reads them by exact type: the first
value of another type ends it, with all its requests. So does a number that its tensors cannot hold. The OpenAI routes
convert most values and pass some on, so they are held to the same types. Names and types are those of SGLang 0.5's
`SamplingParams`; a name that is not among them is left to the engine, which refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Kinds = Mapping[str, Callable[[Any], bool]]
"""Has, by the name of a parameter, whether the engine bears a value; it bears null where it has a default."""

MOST_FLOAT = 3.4028234663852886e38  # the largest of float32
MOST_INT = 1 << 30  # of token counts: the engine's tensors have 32 bits
MOST_LONG = (1 << 63) - 1  # of seeds, and of token ids, which may be those of the tokenizer alone


def misfit(asked: Mapping[str, Any], kinds: Kinds) -> str | None:
    """Return the name of a parameter that the engine does not bear, or None. kinds: NATIVE or OPENAI."""
    for name, value in asked.items():
        fits = kinds.get(name)
        if fits is not None and not (fits(value) if value is not None else fits is not _is_internal):
            return name
    return None


def _is_internal(_: object) -> bool:
    """Refuse any value: the engine itself sets this member."""
    return False


def _is_bool(value: object) -> bool:
    return type(value) is bool


def _is_text(value: object) -> bool:
    return type(value) is str


def _is_texts(value: object) -> bool:
    return type(value) is str or (type(value) is list and set(map(type, value)) <= {str})


def _is_int(value: object) -> bool:
    return type(value) is int and -MOST_INT <= value <= MOST_INT


def _is_long(value: object) -> bool:
    return type(value) is int and -MOST_LONG <= value <= MOST_LONG


def _is_longs(value: object) -> bool:
    return type(value) is list and all(map(_is_long, value))


def _is_float(value: object) -> bool:
    return (type(value) is float or type(value) is int) and -MOST_FLOAT <= value <= MOST_FLOAT


def _is_floats(value: object) -> bool:
    return type(value) is dict and all(map(_is_float, value.values()))


def _is_scalar(value: object) -> bool:
    return value is None or type(value) in (bool, str) or _is_long(value) or _is_float(value)


def _is_custom(value: object) -> bool:
    """Return whether each value is a scalar, or a list or an object of scalars."""
    return type(value) is dict and all(
        all(map(_is_scalar, each if type(each) is list else each.values() if type(each) is dict else (each,)))
        for each in value.values()
    )


def _spaces(value: object) -> bool:
    """Return whether the one argument of a chat's template that becomes a sampling parameter is true or false."""
    spaces = value.get("spaces_between_special_tokens") if type(value) is dict else None
    return spaces is None or _is_bool(spaces)


_SHARED: Kinds = {
    **dict.fromkeys(
        ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"), _is_float
    ),
    **dict.fromkeys(("ignore_eos", "skip_special_tokens", "no_stop_trim"), _is_bool),
    **dict.fromkeys(("regex", "ebnf", "json_schema"), _is_text),
    **dict.fromkeys(("stop", "stop_regex"), _is_texts),
    "stop_token_ids": _is_longs,
    "logit_bias": _is_floats,
    "custom_params": _is_custom,
}
NATIVE: Kinds = {
    **_SHARED,
    **dict.fromkeys(("max_new_tokens", "min_new_tokens", "top_k", "n", "beam_width", "stream_interval"), _is_int),
    **dict.fromkeys(
        (
            "stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len", "is_normalized",
            "ebnf_full_assistant",
        ),
        _is_internal,
    ),
    "sampling_seed": _is_long,
    "spaces_between_special_tokens": _is_bool,
    "structural_tag": _is_text,
}  # fmt: skip
OPENAI: Kinds = {
    **_SHARED,
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "min_tokens", "top_k"), _is_int),
    "seed": _is_long,
    "chat_template_kwargs": _spaces,
}
