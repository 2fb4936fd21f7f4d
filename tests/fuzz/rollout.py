"""These targets feed what reaches the rollout controller and its task processes:
answers, conversations, templates, rows.
"""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
from pydantic import ValidationError

from colocated_rl_api.columns import CONTENT_TYPE
from colocated_rl_api.prompts import FILE_ENDINGS
from colocated_rl_rollout.engines.engine_client import (
    GateRefused,
    Generated,
    GenerateRequest,
    RequestRejected,
    _GateAnswer,
    _refusal,
    _Stream,
)
from colocated_rl_rollout.gateway.openai_requests import (
    ChatBody,
    RequestRefused,
    TextBody,
    asked,
    prompt_of,
    read_body,
    read_chat,
    read_reward,
    text_prompt_of,
)
from colocated_rl_rollout.rules.chat import Chat, ModelUnusable, Unrenderable
from colocated_rl_rollout.rules.samples import Tokens
from colocated_rl_rollout.rules.tool_calls import read_calls
from colocated_rl_rollout.tasks.rows import Row, Rows, RowsUnusable
from colocated_rl_rollout.tasks.task_wire import FIGURES, PROMPT_ROWS, SCORE, TaskReply
from fakes.rollout import write_model

REQUEST = GenerateRequest([1, 2, 3], 64, 1.0, {2}, experts_from=0)
MOST_ANSWER_BYTES = 2048
STATUSES = (400, 401, 404, 408, 429, 500, 502, 503)
CONVERSATION = [{"role": "system", "content": "a"}, {"role": "user", "content": "é <b>"}]


def generated(data: bytes) -> None:
    """An answer of a gate has tokens that describe each other, or one of the errors that are stated.

    The first byte chooses a whole answer, in JSON or in columns, a stream, or an error of some status.
    """
    choice, body = (data[0] if data else 0), data[1:]
    grown: list[Tokens] = []
    try:
        if choice % 3 == 2:
            raise _refusal("gate", STATUSES[choice // 3 % len(STATUSES)], body.decode(errors="replace"))
        read = (
            _GateAnswer("gate", MOST_ANSWER_BYTES, REQUEST, accepts_unversioned=True)
            if choice % 3
            else _Stream("gate", MOST_ANSWER_BYTES, REQUEST, True, grown.append)
        )
        for at in range(0, len(body), 512):
            read.feed(body[at : at + 512])
        _is_sound(read.end(CONTENT_TYPE if choice >= 128 else "application/json"))
    except (GateRefused, RequestRejected) as refusal:
        str(refusal).encode()
    lengths = [len(tokens) for tokens in grown]
    assert lengths == sorted(set(lengths))


def _is_sound(answer: Generated) -> None:
    tokens = answer.tokens
    assert len(tokens.ids) == len(tokens.logp)
    assert bool(np.isfinite(tokens.logp).all() and (tokens.ids >= 0).all())
    assert [span.start for span in tokens.spans] == [0, *(span.end for span in tokens.spans)][: len(tokens.spans)]
    assert (tokens.spans[-1].end if tokens.spans else 0) == len(tokens.ids)


@functools.cache
def _model() -> Path:
    return write_model(Path(tempfile.mkdtemp(prefix="fuzz-model-")))


@functools.cache
def _chat() -> Chat:
    model = _model()
    template = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").write_text("{{ tools | tojson if tools }}{# <tool_call> #}" + template)
    return Chat(model)


def chat_request(data: bytes) -> None:
    """A request of a client becomes a prompt, or is refused in words that can be sent."""
    try:
        body, _ = read_body(ChatBody, data, model="m")
        prompt = prompt_of(read_chat(body, _chat()), _chat())
        assert prompt
        asked(body, prompt, limit=64, temperature=1.0, longest=4096)
    except RequestRefused as refusal:
        json.dumps(refusal.body()).encode()
    try:
        body_, _ = read_body(TextBody, data, model="m")
        ids = text_prompt_of(body_, _chat())
        assert all(0 <= one < _chat().vocabulary for one in ids)
        asked(body_, ids, limit=64, temperature=1.0)
    except RequestRefused as refusal:
        json.dumps(refusal.body()).encode()
    try:
        read_reward(data)
    except RequestRefused as refusal:
        json.dumps(refusal.body()).encode()
    text = data.decode(errors="replace")
    around, calls = read_calls(text)
    assert len(around) <= len(text)
    for call in calls:
        assert isinstance(json.loads(call.arguments), dict)


def chat_template(data: bytes) -> None:
    """A model's template makes text of a conversation, or the model or the conversation can't be used."""
    model = _model()
    (model / "chat_template.jinja").write_bytes(data)
    try:
        chat = Chat(model)
    except ModelUnusable:
        return
    try:
        chat.rendered(CONVERSATION).encode()
    except Unrenderable as error:
        str(error).encode()
    except UnicodeEncodeError:
        pass  # `Chat.encode` says so
    try:
        assert chat.prompt_ids("a")
    except Unrenderable as error:
        str(error).encode()


def task_line(data: bytes) -> None:
    """A line of a task process is read as what was asked for, or the process is given up."""
    try:
        reply = TaskReply.model_validate_json(data)
    except ValidationError:
        return
    for kind in (PROMPT_ROWS, SCORE, FIGURES):
        try:
            kind.validate_python(reply.value)
        except ValidationError:
            continue


def rows_file(data: bytes) -> None:
    """A file of rows is unusable, or each row of it is found again. The first byte chooses the format."""
    ending = FILE_ENDINGS[(data[0] if data else 0) % len(FILE_ENDINGS)]
    with tempfile.TemporaryDirectory() as made:
        path = Path(made, f"rows{ending}")
        path.write_bytes(data[1:])
        _read_rows(path)


def rows_table(data: bytes) -> None:
    """A table that Arrow can write is read in both its formats, and as the same rows."""
    try:
        table = pyarrow.Table.from_pylist(json.loads(data))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError, pyarrow.ArrowException):
        return
    if not table.num_columns:
        return
    with tempfile.TemporaryDirectory() as made:
        arrow, parquet = Path(made, "rows.arrow"), Path(made, "rows.parquet")
        with pyarrow.OSFile(str(arrow), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        try:
            pyarrow.parquet.write_table(table, parquet)
        except pyarrow.ArrowException:  # a struct without members, for one
            return
        assert repr(_read_rows(arrow)) == repr(_read_rows(parquet))  # a number that is none is equal to nothing


def _read_rows(path: Path) -> list[Row] | None:
    seen: list[Any] = []

    def check(row: Row) -> str | None:
        seen.append(row)
        return None

    try:
        rows = Rows([path], cache=path.parent / "cache", check=check)
    except RowsUnusable as error:
        str(error).encode()
        return None
    try:
        read = [rows[number] for number in range(len(rows))]
        assert repr(seen) == repr(read)
        return read
    finally:
        rows.close()
