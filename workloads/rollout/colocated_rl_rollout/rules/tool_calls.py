"""Tool calls, as a policy writes them and as OpenAI's API says them. Pure.

One form is read: JSON between tags, as Hermes models and Qwen 2.5 and 3 write it. Nothing is guessed about a template
that teaches another form: then tools are refused. What a policy wrote and is no whole call stays text.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

BEGIN = "<tool_call>"
FORM = 'JSON between <tool_call> tags: {"name": ..., "arguments": {...}}'
_END = re.compile(r"\}\s*</tool_call>")  # in a text of a call's arguments the tag may stand too


class ToolCall(NamedTuple):
    name: str
    arguments: str  # JSON


def reads_calls_of(template: str) -> bool:
    """Whether a chat template shows tools, and has the policy call them in the form that is read here."""
    return "tools" in template and BEGIN in template and "<function=" not in template


def read_calls(text: str) -> tuple[str, list[ToolCall]]:
    """What stands around the calls, and the calls; the text as it is and none unless each of them is whole."""
    around, calls, place = "", [], 0
    while (begin := text.find(BEGIN, place)) >= 0:
        end = _END.search(text, begin)
        call = _call(text[begin + len(BEGIN) : end.start() + 1]) if end else None
        if end is None or call is None:  # the rest is not looked at: a policy may begin ten thousand calls
            return text, []
        calls.append(call)
        around += text[place:begin]
        place = end.end()
    around += text[place:]
    return around if around.strip() or not calls else "", calls


def arguments_of(written: Any) -> Any:
    """Arguments as a template wants them: an object, where a client sends its JSON."""
    if not isinstance(written, str):
        return written
    try:
        read = json.loads(written)
    except (ValueError, RecursionError):
        return written
    return read if isinstance(read, dict) else written


def _call(text: str) -> ToolCall | None:
    try:
        said = json.loads(text)
        json.dumps(said, ensure_ascii=False).encode()  # half a character may be escaped, and could not be sent on
    except (ValueError, RecursionError):
        return None
    match said:
        case {"name": str(name), "arguments": dict(arguments)}:
            return ToolCall(name, json.dumps(arguments, ensure_ascii=False))
        case _:
            return None
