"""Convert text to token ids and back with the model's own tokenizer and chat template.

This module reads the model's directory: `tokenizer.json`, the chat template, the end tokens. It renders templates in
the sandbox and with the settings of transformers, without its import time and its torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from colocated_rl_api.logs import in_places, in_words
from colocated_rl_rollout.rules.tool_calls import BEGIN, END, arguments_of

RENDERING_ERRORS = (
    TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError,
)  # fmt: skip
"""A template may raise these about a conversation: it calls methods of whatever a client sends."""
READING_ERRORS = TemplateError, SyntaxError, ValueError, RecursionError, MemoryError
"""jinja raises these about a template, Python's compiler about the module that jinja makes of it."""
MAX_TEXT_BYTES = 16 * 1024 * 1024  # of the template, and of each file of settings
DEFAULT, TOOL_USE = "default", "tool_use"  # of several templates: that of all conversations, and of those with tools
TEMPLATE_FILES = {DEFAULT: "chat_template.jinja", TOOL_USE: f"additional_chat_templates/{TOOL_USE}.jinja"}
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class ModelUnusable(Exception):
    """The model's directory lacks a file that rollout needs. The user has to fix the model; a retry does not help."""


class Unrenderable(Exception):
    """The template rejects this conversation. It may accept another one.

    detail: the template's message, only for the sender of the conversation, because it may quote the conversation.
    """

    def __init__(self, message: str, *, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail or message


class Chat:
    """Hold the tokenizer and chat template of one model. Raises ModelUnusable.

    tools_template: the text of the one that conversations with tools get. tools_fault: why none can be rendered; "" if
    it can. end_ids: tokens that end a response. vocabulary: all ids are below it. special_ids: tokens that stand for no
    text; tags of tool calls are text, though some tokenizers have them special. byte_ids: tokens that stand for one
    byte, where the tokenizer has them.
    """

    def __init__(self, model: Path) -> None:
        config = _read_json(model / "tokenizer_config.json")
        try:
            self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        except Exception as error:  # the library raises nothing narrower
            raise ModelUnusable(
                f"{model / 'tokenizer.json'}: {error}; save the model with its fast tokenizer"
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._special = {name: text for name in SPECIAL_TOKENS if (text := _token_text(config.get(name))) is not None}
        template = _template_text(model, config, DEFAULT)
        if template is None:
            raise ModelUnusable(f"{model}: no chat template: add chat_template.jinja beside the tokenizer")
        self._render = self._render_tools = _renderer(template)
        self.tools_template, self.tools_fault = template, ""
        try:
            for_tools = _template_text(model, config, TOOL_USE)
            if for_tools is not None and for_tools != template:
                self.tools_template, self._render_tools = for_tools, _renderer(for_tools, of=f" {TOOL_USE}")
        except ModelUnusable as error:  # of no matter to conversations without tools
            self.tools_fault = str(error)
        self.vocabulary: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        added = self._tokenizer.get_added_tokens_decoder()
        special = {token.content: number for number, token in added.items() if token.special}
        self._special_texts = {text: number for text, number in special.items() if text not in (BEGIN, END)}
        self._has_special_tags = len(self._special_texts) < len(special)
        self.special_ids = frozenset(self._special_texts.values())
        bytes_alone = (self._tokenizer.token_to_id(f"<0x{value:02X}>") for value in range(256))
        self.byte_ids = frozenset(number for number in bytes_alone if number is not None)
        self.end_ids = frozenset(self._end_ids(model))
        if not self.end_ids:
            raise ModelUnusable(
                f"{model}: no eos_token in generation_config.json, config.json or tokenizer_config.json"
            )

    def prompt_ids(self, prompt: str | list[dict[str, Any]]) -> tuple[int, ...]:
        """Return the prompt ids of a user's prompt, or of a conversation, up to where the model's answer begins.

        A message has the form that a client of the gateway sends, but tables have every member in each message, most of
        them null. Raises Unrenderable.
        """
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        try:
            ids = self.encode(self.rendered([as_rendered(message) for message in messages]))
        except (Unrenderable, *RENDERING_ERRORS) as error:
            why = error if isinstance(error, Unrenderable) else in_places(error)
            raise Unrenderable(f"the model's chat template can't be rendered: {why}") from error
        if not ids:
            raise Unrenderable("the model's chat template makes no token of it")
        return ids

    def rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Render a conversation as text, up to the policy's turn. options: of the template. Raises Unrenderable."""
        variables = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": True}
        render = self._render if tools is None else self._render_tools
        try:
            return render({**(options or {}), **self._special, **variables})
        except RENDERING_ERRORS as error:
            raise Unrenderable(in_places(error), detail=in_words(error)[:500]) from error

    def encode(self, text: str, *, special: bool = False) -> tuple[int, ...]:
        """Encode a text. special: include what the tokenizer puts before a text by default. Raises Unrenderable."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise Unrenderable(f"half a character in the text: {error.reason}") from error
        return tuple(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of a whole response, without special tokens."""
        if self._has_special_tags:
            ids = [token for token in ids if token not in self.special_ids]
        return str(self._tokenizer.decode(ids, skip_special_tokens=not self._has_special_tags))

    def never_in_text(self, stop: str) -> bool:
        """Return whether the stop string contains a special token and is not itself a token that ends a response."""
        return any(text in stop for text in self._special_texts) and self._special_texts.get(stop) not in self.end_ids

    def token_text(self, token: int) -> str:
        """Return one token as text, special tokens too. Part of a character becomes the replacement character."""
        return str(self._tokenizer.decode([token], skip_special_tokens=False))

    def _end_ids(self, model: Path) -> list[int]:
        found: list[int] = []
        for name in ("generation_config.json", "config.json"):
            value = _read_json(model / name, optional=True).get("eos_token_id")
            found += value if isinstance(value, list) else [] if value is None else [value]
        if (text := self._special.get("eos_token")) and (number := self._tokenizer.token_to_id(text)) is not None:
            found.append(number)
        return found


def as_rendered(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as templates expect it: text in one piece, no null, arguments of calls as objects."""
    rendered = {name: value for name, value in message.items() if value is not None}
    content = rendered.get("content", "")
    rendered["content"] = content if isinstance(content, str) else "".join(part["text"] for part in content)
    if rendered["role"] == "developer":
        rendered["role"] = "system"
    if calls := rendered.pop("tool_calls", None):
        rendered["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": arguments_of(call["function"]["arguments"])}}
            for call in calls
        ]
    return rendered


class _GenerationBlocks(Extension):
    """Accept `{% generation %}`, which marks the assistant's text in training templates, and ignore it."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _renderer(template: str, *, of: str = "") -> Callable[[Mapping[str, Any]], str]:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    try:
        return environment.from_string(template).render
    except READING_ERRORS as error:
        raise ModelUnusable(f"the model's chat template{of} can't be read: {error}") from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write a value as transformers does: a template may give each option, by its name or its place."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _template_text(model: Path, config: dict[str, Any], name: str) -> str | None:
    """Return the template of that name, chosen as transformers does, or None. Raises ModelUnusable."""
    path = model / TEMPLATE_FILES[name]
    try:
        if path.exists():
            return _read_text(path)
    except (OSError, ValueError) as error:
        raise ModelUnusable(f"{path} can't be read: {error}") from error
    if (model / TEMPLATE_FILES[DEFAULT]).exists():
        return None
    written = config.get("chat_template")
    listed = written if isinstance(written, list) else [{"name": DEFAULT, "template": written}]
    text = {str(entry.get("name")): entry.get("template") for entry in listed}.get(name)
    return text if isinstance(text, str) else None


def _token_text(value: Any) -> str | None:
    """Return the text of a special token, which is written as a string or as a mapping with `content`."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _read_text(path: Path) -> str:
    """Read a text. Raises OSError, and ValueError for what is no text or too much of it."""
    with path.open("rb") as stream:
        text = stream.read(MAX_TEXT_BYTES + 1)
    if len(text) > MAX_TEXT_BYTES:
        raise ValueError(f"more than {MAX_TEXT_BYTES} bytes")
    return text.decode()


def _read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    if optional and not path.exists():
        return {}
    try:
        read = json.loads(_read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelUnusable(f"{path} can't be read: {error}") from error
    if not isinstance(read, dict):
        raise ModelUnusable(f"{path} is no JSON object")
    return read
