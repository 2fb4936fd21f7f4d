"""This module finds sampling parameters that kill an engine. Pure.

SGLang passes `sampling_params` of `/generate` on as they are, and its scheduler reads them by exact type: the first
value of another type ends it, with all its requests. So does a number that its tensors cannot hold. The OpenAI routes
convert most values and pass some on, so they are held to the same types. Names and types are those of SGLang 0.5's
`SamplingParams`, which bears null where it has a default; a name that is not among them is left to the engine, which
refuses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # the standard library's can't be read by pydantic before Python 3.12

MOST_FLOAT = 3.4028234663852886e38  # the largest of float32
MOST_INT = 1 << 30  # of token counts: the engine's tensors have 32 bits
MOST_LONG = (1 << 63) - 1  # of seeds, and of token ids, which may be those of the tokenizer alone


def _refuse(_: object) -> None:
    raise ValueError("the engine itself sets this member")


Float = Annotated[float, Field(ge=-MOST_FLOAT, le=MOST_FLOAT, allow_inf_nan=False)]
Int = Annotated[int, Field(ge=-MOST_INT, le=MOST_INT)]
Long = Annotated[int, Field(ge=-MOST_LONG, le=MOST_LONG)]
Scalar = bool | str | Long | Float | None
Internal = Annotated[object, AfterValidator(_refuse)]


class _Shared(TypedDict, total=False):
    """Has the parameters that both kinds of route pass on."""

    __pydantic_config__ = ConfigDict(strict=True)  # type: ignore[misc]

    temperature: Float | None
    top_p: Float | None
    top_k: Int | None
    min_p: Float | None
    frequency_penalty: Float | None
    presence_penalty: Float | None
    repetition_penalty: Float | None
    ignore_eos: bool | None
    skip_special_tokens: bool | None
    no_stop_trim: bool | None
    regex: str | None
    ebnf: str | None
    json_schema: str | None
    stop: str | list[str] | None
    stop_regex: str | list[str] | None
    stop_token_ids: list[Long] | None
    logit_bias: dict[str, Float] | None
    custom_params: dict[str, Scalar | list[Scalar] | dict[str, Scalar]] | None


class _Native(_Shared, total=False):
    max_new_tokens: Int | None
    min_new_tokens: Int | None
    n: Int | None
    beam_width: Int | None
    stream_interval: Int | None
    sampling_seed: Long | None
    spaces_between_special_tokens: bool | None
    structural_tag: str | None
    stop_strs: Internal
    stop_regex_strs: Internal
    stop_str_max_len: Internal
    stop_regex_max_len: Internal
    is_normalized: Internal
    ebnf_full_assistant: Internal


class _TemplateOptions(TypedDict, total=False):
    """Has the one argument of a chat's template that becomes a sampling parameter."""

    spaces_between_special_tokens: bool | None


class _OpenAI(_Shared, total=False):
    max_tokens: Int | None
    max_completion_tokens: Int | None
    min_tokens: Int | None
    seed: Long | None
    chat_template_kwargs: _TemplateOptions | None


Kinds = TypeAdapter[_Native] | TypeAdapter[_OpenAI]
NATIVE, OPENAI = TypeAdapter(_Native), TypeAdapter(_OpenAI)


def misfit(asked: Mapping[str, Any], kinds: Kinds) -> str | None:
    """Return the name of a parameter that the engine does not bear, or None. kinds: NATIVE or OPENAI."""
    try:
        kinds.validate_python(asked)
    except ValidationError as error:
        return str(error.errors(include_url=False, include_context=False, include_input=False)[0]["loc"][0])
    return None
