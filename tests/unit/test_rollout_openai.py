"""The gateway takes whatever comes in as it is, or refuses it with a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tokenizers import Tokenizer, decoders, models

from colocated_rl_api.rungs import WeightVersion
from colocated_rl_rollout.engines import engine_client
from colocated_rl_rollout.engines.engine_client import RequestRejected
from colocated_rl_rollout.gateway.openai_replies import (
    CompletionReply,
    Pieces,
    extension,
    settled,
    visible,
)
from colocated_rl_rollout.gateway.openai_requests import (
    MEMBERS_AT_MOST,
    ONLY,
    PARTS_AT_MOST,
    WITHOUT_EFFECT,
    ChatBody,
    CompletionRequest,
    Form,
    RequestRefused,
    TextBody,
    asked,
    prompt_of,
    read_body,
    read_chat,
    read_reward,
    text_prompt_of,
)
from colocated_rl_rollout.gateway.turns import refusal_of
from colocated_rl_rollout.rules.chat import Chat
from colocated_rl_rollout.rules.resume import cut, stopped_at
from colocated_rl_rollout.rules.samples import Finish, Span, Tokens
from colocated_rl_rollout.rules.tool_calls import read_calls, reads_calls_of
from fakes.rollout import write_model

TEXT = st.text('ab <>{"é\ud800', max_size=8)
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
CALL = '<tool_call>\n{"name": "find", "arguments": {"what": "it"}}\n</tool_call>'


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    model = write_model(tmp_path_factory.mktemp("model"))
    template = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").write_text("{{ tools | tojson if tools }}{# <tool_call> #}" + template)
    return Chat(model)


def tokens_of(chat: Chat, text: str) -> Tokens:
    ids = np.array(chat.encode(text), np.int32)
    return Tokens(ids, -np.ones(len(ids), np.float32), (Span(WeightVersion(0, 1), 0, len(ids)),))


def answer_to(kind: type[ChatBody] | type[TextBody], text: bytes, chat: Chat) -> CompletionRequest | RequestRefused:
    try:
        body, _ = read_body(kind, text, model="m")
        prompt = prompt_of(read_chat(body, chat), chat) if isinstance(body, ChatBody) else text_prompt_of(body, chat)
        return asked(body, prompt, limit=100, temperature=1.0)
    except RequestRefused as refused:
        return refused


def parameters() -> list[str]:
    return sorted({*ChatBody.model_fields, *TextBody.model_fields, *ONLY, *WITHOUT_EFFECT})


@given(fields=st.dictionaries(st.sampled_from(parameters()), JSON, max_size=6), whole=st.booleans())
def test_whatever_is_asked_is_taken_or_refused(chat: Chat, fields: dict[str, Any], whole: bool) -> None:
    """Nothing else than a refusal leaves a request, and what is taken is within its bounds."""
    base = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "prompt": "hi"}
    kinds: list[tuple[type[ChatBody] | type[TextBody], str]] = [(ChatBody, "prompt"), (TextBody, "messages")]
    for kind, other in kinds:
        body = {name: value for name, value in ({**base, **fields} if whole else fields).items() if name != other}
        taken = answer_to(kind, json.dumps(body).encode(), chat)
        if isinstance(taken, RequestRefused):
            assert taken.status in (400, 404)
            assert {"message", "type", "param", "code"} == set(taken.body()["error"])
        else:
            assert 1 <= taken.limit <= 100
            assert 0 <= taken.temperature <= 2
            assert all(0 <= token < chat.vocabulary for token in taken.prompt)


@given(body=st.binary(max_size=64))
def test_what_is_no_json_is_refused(body: bytes) -> None:
    with pytest.raises(RequestRefused):
        read_body(ChatBody, body, model="m")


def refusal(chat: Chat, body: str, kind: type[ChatBody] | type[TextBody] = ChatBody) -> RequestRefused:
    base = '"model": "m", "messages": [{"role": "user", "content": "hi"}]'
    base = base if kind is ChatBody else '"model": "m"'
    refused = answer_to(kind, f"{{{base}, {body}}}".encode(), chat)
    assert isinstance(refused, RequestRefused)
    return refused


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ('"n": 2', "n", "send several requests"),
        ('"stop": [[2, 3]]', "stop.0", "not token ids"),
        ('"stop": 7', "stop", "a text, or a list of up to 16"),
        ('"stop": ""', "stop", "a text, or a list of up to 16"),
        ('"stop": ["fine", "<|im_start|>"]', "stop", "a special token is in no text"),
        ('"stop_token_ids": [2]', "stop_token_ids", "at its limit, or at a text in stop"),
        ('"logit_processors": []', "logit_processors", "not a parameter that is known here"),
        ('"min_tokens": 4', "min_tokens", "ends where the policy ends it"),
        ('"max_tokens": 0', "max_tokens", "1 at least"),
        ('"max_tokens": 8.5', "max_tokens", "a whole number"),
        ('"max_tokens": 4, "max_completion_tokens": 5', "max_tokens", "send one of them"),
        ('"logit_bias": {"7": -100}', "logit_bias", "would not describe"),
        ('"seed": -1', "seed", "from 0 up"),
        ('"seed": "7"', "seed", "a whole number"),
        ('"response_format": {"type": "json_object"}', "response_format", "constrained decoding"),
        ('"tool_choice": "required"', "tool_choice", "constrained decoding"),
        ('"parallel_tool_calls": false', "parallel_tool_calls", "constrained decoding"),
        (
            '"tools": [{"type": "function", "function": {"name": "f", "strict": "yes"}}]',
            "tools.0.function.strict", "functions, each with a name",
        ),
        ('"stream_options": {"include_usage": true}', "stream_options", "with stream: true alone"),
        (
            '"stream": true, "stream_options": {"include_obfuscation": true}',
            "stream_options.include_obfuscation", "only include_usage",
        ),
        (
            '"chat_template_kwargs": {"add_generation_prompt": false}',
            "chat_template_kwargs.add_generation_prompt", "a prompt ends where the policy's answer begins",
        ),
        (
            '"chat_template_kwargs": {"messages": []}',
            "chat_template_kwargs.messages", "write them in messages of the request",
        ),
        ('"chat_template_kwargs": {"bos_token": ""}', "chat_template_kwargs.bos_token", "is the tokenizer's"),
        ('"logprobs": 3', "logprobs", "true in a chat"),
        ('"logprobs": true, "top_logprobs": 5', "top_logprobs", "that were drawn alone"),
        ('"temperature": 1e999', "temperature", "from 0 to 2"),
        ('"temperature": NaN', None, "NaN is no number"),
        ('"temperature": 0, "temperature": 1', "temperature", "stands twice"),
        ('"metadata": {"a": 1, "a": 2}', "a", "stands twice"),
        ('"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]', "messages", "twice"),
    ],
)  # fmt: skip
def test_what_is_asked_wrongly_is_named_with_what_to_write(
    chat: Chat, body: str, param: str | None, message: str
) -> None:
    refused = refusal(chat, body)
    assert (400, param) == (refused.status, refused.param)
    assert message in str(refused)


def test_what_the_rendering_sets_itself_may_be_asked_for_as_it_sets_it(chat: Chat) -> None:
    """The template's engine reported two values for one name in its own words."""
    base = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    options = {"add_generation_prompt": True, "documents": None, "self": "of no effect"}
    plain = answer_to(ChatBody, json.dumps(base).encode(), chat)
    taken = answer_to(ChatBody, json.dumps(base | {"chat_template_kwargs": options}).encode(), chat)
    assert isinstance(plain, CompletionRequest)
    assert isinstance(taken, CompletionRequest)
    assert plain.prompt.tolist() == taken.prompt.tolist()


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ('"prompt": ["one", "two"]', "prompt.0", "several prompts are several requests"),
        ('"prompt": [[1, 2], [3]]', "prompt.0", "several prompts are several requests"),
        ('"prompt": [[]]', "prompt", "has no token"),
        ('"prompt": [""]', "prompt", "has no token"),
        ('"prompt": []', "prompt", "has no token"),
        ('"prompt": "hi", "logprobs": 5', "logprobs", "0 in a completion"),
        ('"prompt": "hi", "echo": true', "echo", "not offered"),
        ('"prompt": "hi", "suffix": "there"', "suffix", "not offered"),
        ('"prompt": "hi", "best_of": 4', "best_of", "send several requests"),
        ('"prompt": "hi", "stop": "a<|im_start|>"', "stop", "a special token"),
    ],
)
def test_what_is_asked_wrongly_of_a_text_is_named_too(chat: Chat, body: str, param: str, message: str) -> None:
    refused = refusal(chat, body, TextBody)
    assert (400, param) == (refused.status, refused.param)
    assert message in str(refused)


MANY = 2000


@pytest.mark.parametrize(
    ("kind", "field", "wrong"),
    [
        (TextBody, "prompt", [1.5] * MANY),
        (TextBody, "prompt", [[1.5] * MANY]),
        (TextBody, "prompt", ["one"] * MANY),
        (TextBody, "stop", [7] * MANY),
        (ChatBody, "messages", [{}] * MANY),
        (ChatBody, "messages", [{"role": "user", "content": [{"type": "image_url"}] * MANY}]),
        (ChatBody, "messages", [{"role": "assistant", "tool_calls": [{}] * MANY}]),
        (ChatBody, "tools", [{}] * MANY),
    ],
)
def test_of_many_faults_few_are_kept(
    chat: Chat, kind: type[ChatBody] | type[TextBody], field: str, wrong: list[Any]
) -> None:
    """A prompt of two million numbers that are no ids took 8 GB, and the controller with it."""
    base = {"model": "m", "prompt": "hi"} if kind is TextBody else {"model": "m", "messages": [{"role": "user"}]}
    refused = answer_to(kind, json.dumps(base | {field: wrong}).encode(), chat)
    assert isinstance(refused, RequestRefused)
    assert refused.param
    assert refused.param.startswith(field)
    assert isinstance(refused.__cause__, ValidationError)
    assert refused.__cause__.error_count() < 10


def test_an_object_without_end_is_refused(chat: Chat) -> None:
    body = {"model": "m", "prompt": "hi"} | {f"name{number}": 1 for number in range(MEMBERS_AT_MOST)}
    refused = answer_to(TextBody, json.dumps(body).encode(), chat)
    assert f"{MEMBERS_AT_MOST + 2} members" in str(refused)
    with pytest.raises(RequestRefused, match=f"{MEMBERS_AT_MOST + 2} members"):
        read_reward(json.dumps(body).encode())


@pytest.mark.parametrize("part", ["{}", "[]"])
def test_a_request_of_very_many_parts_is_refused_before_it_is_read(part: str) -> None:
    """One of 8 MB took 400 MB for as long as it waited for an engine, and thirty could wait."""
    parts = ",".join([part] * (PARTS_AT_MOST + 1))
    for sent in (f'{{"x": [{parts}]}}', f'{{"arguments": "[{parts}]"}}'):
        with pytest.raises(RequestRefused, match=f"more than {PARTS_AT_MOST} of"):
            read_body(ChatBody, sent.encode(), model="m")


@pytest.mark.parametrize("body", ["[1]", '"a"', "null", '{"reward": 1, "reward": 2, "group": "a"}', '{"reward": NaN}'])
def test_a_reward_that_is_none_is_refused_in_words(body: str) -> None:
    with pytest.raises(RequestRefused, match=r"not a JSON object|stands twice|NaN is no number"):
        read_reward(body.encode())


@pytest.mark.parametrize("one", ["hi there", [5, 6, 7], [5]])
def test_a_list_of_one_prompt_is_that_prompt(chat: Chat, one: str | list[int]) -> None:
    """Libraries that could send several prompts send one so."""
    alone, listed = (
        answer_to(TextBody, json.dumps({"model": "m", "prompt": prompt}).encode(), chat) for prompt in (one, [one])
    )
    assert isinstance(alone, CompletionRequest)
    assert isinstance(listed, CompletionRequest)
    assert alone.prompt.tolist() == listed.prompt.tolist()


def test_an_image_is_named_where_it_stands(chat: Chat) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}
    refused = answer_to(ChatBody, json.dumps(body).encode(), chat)
    assert isinstance(refused, RequestRefused)
    assert "messages.0.content.0.type" == refused.param
    assert "parts of type text" in str(refused)


@pytest.mark.parametrize("strict", [True, False])
def test_a_template_has_tools_as_they_came(chat: Chat, strict: bool) -> None:
    """True is what OpenAI's own helper for functions writes, asked or not."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": strict}}
    plain = {"type": "function", "function": {"name": "g"}, "more": None}
    request = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": [tool, plain]}
    body, _ = read_body(ChatBody, json.dumps(request).encode(), model="m")
    assert (tool, plain) == read_chat(body, chat).tools


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("The input (90 tokens) is longer than the model's context length (64 tokens).", "context_length_exceeded"),
        ("Requested token count exceeds the model's maximum context length of 64 tokens.", "context_length_exceeded"),
        ("Input length (90 tokens) exceeds the maximum allowed length (58 tokens).", "context_length_exceeded"),
        ("temperature must be non-negative", "rejected_by_engine"),
    ],
)
def test_a_prompt_that_is_too_long_is_refused_in_the_engines_words(words: str, code: str) -> None:
    """SGLang 0.5.23's: of the whole context, of prompt and reply together, of the pool for keys and values."""
    rejected = engine_client._refusal("job-gpu-0-0", 400, words)
    assert isinstance(rejected, RequestRejected)
    refused = refusal_of(rejected)
    assert (400, code) == (refused.status, refused.code)
    assert str(refused).endswith(words), "its client is told"
    assert words not in str(rejected), "nobody else is"
    assert f"400 and {len(words)} characters" in str(rejected)


def test_a_token_that_ends_a_response_may_be_named_as_a_stop(chat: Chat) -> None:
    [end] = chat.end_ids
    body = {"model": "m", "prompt": "hi", "stop": [chat.token_text(end)]}
    assert isinstance(answer_to(TextBody, json.dumps(body).encode(), chat), CompletionRequest)


@given(message=st.dictionaries(st.sampled_from(["role", "content", "tool_calls", "tool_call_id", "x"]), JSON))
def test_a_message_of_any_shape_is_rendered_or_refused(chat: Chat, message: dict[str, Any]) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "", **message}]}
    taken = answer_to(ChatBody, json.dumps(body).encode(), chat)
    assert 400 == taken.status if isinstance(taken, RequestRefused) else len(taken.prompt)


def test_deep_and_broken_text_is_refused(chat: Chat) -> None:
    with pytest.raises(RequestRefused, match="not JSON"):
        read_body(ChatBody, b"[" * 100_000, model="m")
    half = {"model": "m", "messages": [{"role": "user", "content": "\ud800"}]}
    body, _ = read_body(ChatBody, json.dumps(half).encode(), model="m")
    with pytest.raises(RequestRefused, match="half a character"):
        prompt_of(read_chat(body, chat), chat)


@pytest.mark.parametrize(
    ("text", "around", "names"),
    [
        (f"Look. {CALL}", "Look. ", ["find"]),
        (f"{CALL}\n{CALL}", "", ["find", "find"]),
        (CALL.removesuffix("</tool_call>"), None, []),
        ('<tool_call>{"name": 1, "arguments": {}}</tool_call>', None, []),
        (f"{CALL}<tool_call>{{broken}}</tool_call>", None, []),
        ('<tool_call>{"name": "say", "arguments": {"text": "<tool_call></tool_call>"}}</tool_call>', "", ["say"]),
        ('<tool_call>{"name": "find", ' * 20_000 + "</tool_call>", None, []),  # is looked through once
        (CALL.replace("it", "\\ud83d"), None, []),  # half a character
        *((CALL.replace('"it"', number), None, []) for number in ("NaN", "-Infinity", "1e999")),  # no JSON
        ("no call", None, []),
    ],
)
def test_tool_calls_are_whole_or_text(text: str, around: str | None, names: list[str]) -> None:
    assert (text if around is None else around, names) == (
        read_calls(text)[0],
        [call.name for call in read_calls(text)[1]],
    )


def test_calls_are_read_of_templates_that_teach_the_form() -> None:
    assert reads_calls_of("{{ tools }} between <tool_call> tags")
    assert not reads_calls_of("{{ messages }}")
    assert not reads_calls_of("{{ tools }} <tool_call><function=name>")
    assert not reads_calls_of("{{ tools }} [TOOL_CALLS]")


@pytest.mark.parametrize("place", ["tokenizer_config.json", "additional_chat_templates"])
def test_tools_are_rendered_by_the_template_that_the_model_has_for_them(tmp_path: Path, place: str) -> None:
    """Hermes 2 Pro and 3 have one, by the name that transformers knows: tools were refused for want of it."""
    model = write_model(tmp_path)
    templates = {"default": "{{ messages[0].content }}", "tool_use": "{{ tools | tojson }}{# <tool_call> #}"}
    if place == "tokenizer_config.json":
        (model / "chat_template.jinja").unlink()
        config = json.loads((model / place).read_text())
        listed = [{"name": name, "template": text} for name, text in templates.items()]
        (model / place).write_text(json.dumps({**config, "chat_template": listed}))
    else:
        (model / "chat_template.jinja").write_text(templates["default"])
        (model / place).mkdir()
        (model / place / "tool_use.jinja").write_text(templates["tool_use"])
    chat = Chat(model)
    tool = {"type": "function", "function": {"name": "find"}}
    for tools, expected in ((None, "Hi"), ([tool], json.dumps([tool]))):
        asked_for = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "tools": tools}
        body, _ = read_body(ChatBody, json.dumps(asked_for).encode(), model="m")
        assert expected == chat.text(prompt_of(read_chat(body, chat), chat))


@pytest.mark.parametrize("template", [b"{% if tools %}", b"\xff"], ids=["no template", "no text"])
def test_a_broken_template_for_tools_costs_requests_with_tools_alone(tmp_path: Path, template: bytes) -> None:
    """The model was unusable: its job generated nothing, though no prompt had a tool."""
    model = write_model(tmp_path)
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_bytes(template)
    chat = Chat(model)
    assert chat.prompt_ids("Hi")
    asked_for = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    body, _ = read_body(ChatBody, json.dumps(asked_for).encode(), model="m")
    assert prompt_of(read_chat(body, chat), chat)
    with_tools = {**asked_for, "tools": [{"type": "function", "function": {"name": "find"}}]}
    body, _ = read_body(ChatBody, json.dumps(with_tools).encode(), model="m")
    with pytest.raises(RequestRefused, match=r"tool_use.* can't be read: ") as refused:
        read_chat(body, chat)
    assert (400, "tools") == (refused.value.status, refused.value.param)


@pytest.mark.parametrize("streams", [False, True])
def test_calls_are_found_also_where_the_tokenizer_has_their_tags_special(tmp_path: Path, streams: bool) -> None:
    """Some Hermes models have: their calls came as text without tags, and no client called a tool."""
    model = write_model(tmp_path)
    (model / "chat_template.jinja").write_text("{{ tools }}{# <tool_call> #}")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_special_tokens(["<tool_call>", "</tool_call>"])
    tokenizer.save(str(model / "tokenizer.json"))
    chat = Chat(model)
    tokens = tokens_of(chat, f"Look. {CALL}<|im_end|>")
    asks = CompletionRequest(np.array([1], np.int32), 100, 1.0)
    reply = CompletionReply(Form(chat=True, streams=streams, tools=True), asks, "m", 1, "id")
    more = extension(tokens, Finish.STOP, 1)
    if streams:
        pieces = Pieces(reply, chat)
        events = [event for length in range(len(tokens)) for event in pieces.more(cut(tokens, length))]
        deltas = [event["choices"][0]["delta"] for event in (*events, *pieces.rest(tokens, Finish.STOP, more))]
        text = "".join(delta.get("content", "") for delta in deltas)
        called = next(delta["tool_calls"] for delta in deltas if "tool_calls" in delta)
    else:
        message = reply.whole(chat, tokens, Finish.STOP, more)["choices"][0]["message"]
        text, called = message["content"], message["tool_calls"]
    assert ("Look. ", ["find"]) == (text, [call["function"]["name"] for call in called])
    assert not chat.never_in_text("</tool_call>")
    assert chat.never_in_text("<|im_start|>")


@pytest.mark.parametrize("streams", [False, True])
def test_a_text_goes_on_where_its_prompt_ends(tmp_path: Path, streams: bool) -> None:
    """A tokenizer like Llama's drops the space that begins a text: "The sea" went on as "is", and not as " is"."""
    model = write_model(tmp_path)
    words = ["<s>", "</s>", "<|im_end|>", "▁The", "▁sea", "▁is", "▁blue", "."]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens(words[:3])
    tokenizer.save(str(model / "tokenizer.json"))
    chat = Chat(model)
    ids = np.array([5, 6, 7, 2], np.int32)
    tokens = Tokens(ids, -np.ones(4, np.float32), (Span(WeightVersion(0, 1), 0, 4),))
    for prompt, expected in (((0, 3, 4), " is blue."), ((0,), "is blue.")):
        asks = CompletionRequest(np.array(prompt, np.int32), 100, 1.0)
        reply = CompletionReply(Form(chat=False, streams=streams), asks, "m", 1, "id")
        more = extension(tokens, Finish.STOP, 1)
        if streams:
            pieces = Pieces(reply, chat)
            events = [event for length in range(len(tokens)) for event in pieces.more(cut(tokens, length))]
            events += pieces.rest(tokens, Finish.STOP, more)
        else:
            events = [reply.whole(chat, tokens, Finish.STOP, more)]
        assert expected == "".join(event["choices"][0]["text"] for event in events)


@given(st.text("abé", max_size=12), st.lists(st.text("ab", min_size=1, max_size=3), max_size=2))
def test_what_is_sent_of_a_growing_text_is_never_taken_back(text: str, stops: list[str]) -> None:
    ends = [size for size in range(len(text) + 1) if any(stop in text[:size] for stop in stops)]
    text = text[: ends[0]] if ends else text
    sent = ""
    for size in range(len(text) + 1):
        now = settled(text[:size], stops)
        assert now.startswith(sent)
        assert visible(text, stops).startswith(now)
        sent = now


@given(
    text=st.text("ab<é\U0001f600", max_size=12),
    stops=st.lists(st.sampled_from(["ab", "b<", "é"]), max_size=2, unique=True),
    ends=st.lists(st.integers(0, 40), max_size=6),
    calls=st.booleans(),
)
def test_pieces_add_up_to_the_whole(chat: Chat, text: str, stops: list[str], ends: list[int], calls: bool) -> None:
    """Wherever the tokens are cut, in the middle of a character too."""
    tokens = tokens_of(chat, text + CALL if calls else text)
    stop = stopped_at(tokens.ids, stops, chat.text)
    tokens = tokens if stop is None else cut(tokens, stop)
    reply = CompletionReply(
        Form(chat=True, streams=True, logprobs=True, tools=True),
        CompletionRequest(np.array([1], np.int32), 100, 1.0, tuple(stops)),
        model="m",
        created=0,
        id="x",
    )
    pieces = Pieces(reply, chat)
    chunks = [chunk for end in sorted(ends) for chunk in pieces.more(cut(tokens, end))]
    chunks += pieces.rest(tokens, Finish.STOP, extension(tokens, Finish.STOP, 1))
    choices = [chunk["choices"][0] for chunk in chunks]
    whole = reply.whole(chat, tokens, Finish.STOP, extension(tokens, Finish.STOP, 1))["choices"][0]
    streamed = "".join(choice["delta"].get("content", "") for choice in choices)
    assert (whole["message"]["content"] or "").strip() == streamed.strip()
    logprobs = [token for choice in choices if choice["logprobs"] for token in choice["logprobs"]["content"]]
    assert whole["logprobs"]["content"] == logprobs
    assert whole["finish_reason"] == choices[-1]["finish_reason"]
    called = [call["function"] for choice in choices for call in choice["delta"].get("tool_calls", [])]
    assert [call["function"] for call in whole["message"].get("tool_calls", [])] == called


def test_tokens_of_a_stream_stand_where_they_do_in_the_whole(chat: Chat) -> None:
    """Tokens behind a character of several ones had the places of earlier ones."""
    tokens = tokens_of(chat, "aé c")
    asks = CompletionRequest(np.array([1], np.int32), 100, 1.0)
    reply = CompletionReply(Form(chat=False, streams=True, logprobs=True), asks, "m", 0, "x")
    more = extension(tokens, Finish.STOP, 1)
    pieces = Pieces(reply, chat)
    events = [event for end in range(len(tokens)) for event in pieces.more(cut(tokens, end + 1))]
    choices = [event["choices"][0] for event in (*events, *pieces.rest(tokens, Finish.STOP, more))]
    streamed = [place for choice in choices if choice["logprobs"] for place in choice["logprobs"]["text_offset"]]
    assert reply.whole(chat, tokens, Finish.STOP, more)["choices"][0]["logprobs"]["text_offset"] == streamed


@given(st.text("abc", max_size=20), st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=3))
def test_a_stop_string_ends_where_it_is_first_whole(chat: Chat, text: str, stops: list[str]) -> None:
    ids = np.array(chat.encode(text), np.int32)
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    assert (min(ends) if ends else None) == stopped_at(ids, stops, chat.text)
