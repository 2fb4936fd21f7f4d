"""Translate tool calls between the form that a policy writes and that of OpenAI's API. Pure.

One form is read: JSON between tags, as Hermes models and Qwen 2.5 and 3 write it. Nothing is guessed about a template
that teaches another form: then tools are refused. Output that is not a complete call stays text.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

BEGIN, END = "<tool_call>", "</tool_call>"
FORM = 'JSON between <tool_call> tags: {"name": ..., "arguments": {...}}'
_END = re.compile(r"\}\s*</tool_call>")  # in a text of a call's arguments the tag may stand too


class ToolCall(NamedTuple):
    name: str
    arguments: str  # JSON


def reads_calls_of(template: str) -> bool:
    """Return whether a chat template shows tools and teaches the policy the form of calls that is read here."""
    return "tools" in template and BEGIN in template and "<function=" not in template


def read_calls(text: str) -> tuple[str, list[ToolCall]]:
    """Return the text around the calls, and the calls; if any call is incomplete, the unchanged text and no calls."""
    around, calls, place = "", [], 0
    while (begin := text.find(BEGIN, place)) >= 0:
        end = _END.search(text, begin)
        call = _call(text[begin + len(BEGIN) : end.start() + 1]) if end else None
        if end is None or call is None:  # the rest is skipped: a policy may begin ten thousand calls
            return text, []
        calls.append(call)
        around += text[place:begin]
        place = end.end()
    around += text[place:]
    return around if around.strip() or not calls else "", calls


def arguments_of(written: Any) -> Any:
    """Return arguments as a template expects them: as an object, where a client sends JSON."""
    if not isinstance(written, str):
        return written
    try:
        read = json.loads(written)
    except (ValueError, RecursionError):
        return written
    return read if isinstance(read, dict) else written


def _call(text: str) -> ToolCall | None:
    try:
        called = json.loads(text)
        # half a character may be escaped, and could not be sent on; nor could a number that is none of JSON
        json.dumps(called, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return None
    match called:
        case {"name": str(name), "arguments": dict(arguments)}:
            return ToolCall(name, json.dumps(arguments, ensure_ascii=False))
        case _:
            return None
