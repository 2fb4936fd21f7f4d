"""Sessions: what a multi-turn agent generated is recorded as it was generated, and trained when it has its reward."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam
from safetensors.numpy import load
from waiting import DEADLINE_S, until

from colocated_rl_api.rungs import WeightVersion
from colocated_rl_rollout.tasks.task_wire import RewardAnswer
from fakes.gate import FakeGate, experts_of, logp_of
from fakes.gateway import QUESTION, TOOLS, TOOLS_TEMPLATE, GatewayScene, extra, gateway_running, text_of
from fakes.interface import Checked
from fakes.rollout import CHAT_TEMPLATE, ScriptedConversation

V0, V1 = WeightVersion(0, 1), WeightVersion(1, 1)
AND: ChatCompletionMessageParam = {"role": "user", "content": "And then?"}


class ConversingAgent:
    """A framework that keeps a conversation of its own, and knows of sessions only a header."""

    def __init__(self, scene: GatewayScene, name: str = "s", **options: Any) -> None:
        self.scene = scene
        self.name = name
        self.options = options
        self.messages: list[Any] = []

    async def ask(self, *messages: ChatCompletionMessageParam, **options: Any) -> ChatCompletion:
        self.messages += messages
        completion = await self.scene.ask(
            *self.messages, extra_headers={"X-Session-ID": self.name}, **{**self.options, **options}
        )
        self.messages.append(completion.choices[0].message.model_dump())
        return completion

    async def reward(self, reward: float, group: str = "g", **more: Any) -> httpx.Response:
        return await call(self.scene, "POST", f"/{self.name}/reward", {"reward": reward, "group": group, **more})

    async def shown(self) -> dict[str, Any]:
        answer: dict[str, Any] = (await call(self.scene, "GET", f"/{self.name}")).json()
        return answer


async def call(scene: GatewayScene, method: str, path: str, body: Any = None) -> httpx.Response:
    url = f"http://127.0.0.1:{scene.controller.member.ports.pages}/v1/sessions{path}"
    async with httpx.AsyncClient(trust_env=False, timeout=DEADLINE_S, transport=Checked()) as http:
        return await http.request(method, url, json=body)


def counting(question: str) -> str:
    """An answer that says how many were given before it."""
    return f"Answer {question.count('Answer') + 1}."


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[GatewayScene]:
    async with gateway_running(tmp_path, counting, maxResponseTokens=200) as made:
        await made.gate.open(V0)
        yield made


# ---------------------------------------------------------------------------------------------------- token ids
async def test_the_next_turn_goes_on_from_the_tokens_that_were_generated(tmp_path: Path) -> None:
    """Read from text again they would be others: this reply has bytes that are no character."""
    broken = [130, 200, 131, 60]

    def answer(question: str) -> str | list[int]:
        return "Then nothing." if "And then" in question else broken

    async with gateway_running(tmp_path, answer) as scene:
        chat = scene.job.chat
        assert broken != list(chat.encode(chat.text(broken)))
        await scene.gate.open(V0)
        agent = ConversingAgent(scene)
        await agent.ask(QUESTION)
        await agent.ask(AND)
        first, second = [request["input_ids"] for request in scene.gate.requests]
        between = chat.encode("\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n")
        assert [*first, *broken, 2, *between] == second
        shown = await agent.shown()
        assert (2, 1) == (shown["turns"], shown["paths"])
        path = shown["trajectory"]
        assert first == path["prompt_token_ids"]
        assert [*broken, 2, *between, *chat.encode("Then nothing."), 2] == path["token_ids"]
        assert [1] * 5 + [0] * len(between) + [1] * 14 == path["loss_mask"]
        tokens = zip(path["token_ids"], path["loss_mask"], strict=True)
        assert [logp_of(V0, token) * mask for token, mask in tokens] == pytest.approx(path["logprobs"])


async def test_a_template_that_forgets_thoughts_does_not_make_the_record_forget_them(tmp_path: Path) -> None:
    """Qwen 3's template renders an earlier reply otherwise than it was generated."""
    forgets = CHAT_TEMPLATE.replace("message.content", "message.content.split('</think>')[-1]")

    def answer(question: str) -> str:
        return "<think>hm</think>" + counting(question)

    async with gateway_running(tmp_path, answer, template=forgets) as scene:
        await scene.gate.open(V0)
        agent = ConversingAgent(scene)
        for _ in range(3):
            await agent.ask(QUESTION)
        last = scene.gate.requests[-1]["input_ids"]
        assert 2 == scene.job.chat.text(last).count("<think>hm</think>")
        assert 3 == (await agent.shown())["turns"]


async def test_a_reply_that_was_cut_off_is_ended_by_the_template(scene: GatewayScene) -> None:
    agent = ConversingAgent(scene)
    cut = await agent.ask(QUESTION, max_tokens=3)
    assert ("Ans", "length") == (text_of(cut), cut.choices[0].finish_reason)
    await agent.ask(AND)
    first, second = [request["input_ids"] for request in scene.gate.requests]
    ended = scene.job.chat.encode("Ans<|im_end|>\n<|im_start|>user\n")
    assert [*first, *ended] == second[: len(first) + len(ended)]
    mask = (await agent.shown())["trajectory"]["loss_mask"]
    assert [1, 1, 1, 0, 0] == mask[:5], "the end of it was not the policy's"


async def test_a_history_that_does_not_go_on_from_a_recorded_one_is_a_path_of_its_own(scene: GatewayScene) -> None:
    agent = ConversingAgent(scene)
    await agent.ask(QUESTION)
    await agent.ask(AND)
    agent.messages[-2] = {"role": "user", "content": "Forget it."}
    agent.messages.pop()
    await agent.ask()
    shown = await agent.shown()
    assert (3, 2) == (shown["turns"], shown["paths"]), "from the same first reply"
    agent.messages[0] = {"role": "user", "content": "Something else?"}
    await agent.ask(AND)
    shown = await agent.shown()
    assert (4, 3) == (shown["turns"], shown["paths"])
    text = scene.job.chat.text(shown["trajectory"]["prompt_token_ids"])
    assert "Answer 1." in text, "replies that the session has not recorded there are context"


async def test_prompts_of_tokens_go_on_from_tokens(scene: GatewayScene) -> None:
    """An agent that keeps token ids itself sends them: no text is compared at all."""
    prompt = list(scene.job.chat.prompt_ids("Where is it?"))
    for turn in (1, 2):
        completion = await scene.client.completions.create(
            model="job", prompt=prompt, extra_headers={"X-Session-ID": "t"}, extra_body={"return_token_ids": True}
        )
        assert f"Answer {turn}." == completion.choices[0].text
        prompt += (completion.choices[0].model_extra or {})["token_ids"]
        prompt += scene.job.chat.encode("\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n")
    shown = (await call(scene, "GET", "/t")).json()
    assert (2, 1) == (shown["turns"], shown["paths"])


# ---------------------------------------------------------------------------------------------------- switches, tools
@pytest.mark.parametrize("streams", [False, True])
async def test_an_agent_with_tools_sees_no_switch_in_any_turn(tmp_path: Path, streams: bool) -> None:
    """F33: also while its tools run. What a tool answered is not trained, every other token has its version."""

    def answer(question: str) -> str:
        if question.count("is 4") == 2:
            return "It is 8."
        return '<tool_call>\n{"name": "find", "arguments": {"what": 2}}\n</tool_call>'

    async with gateway_running(tmp_path, answer, template=TOOLS_TEMPLATE, maxResponseTokens=200) as scene:
        url = f"http://127.0.0.1:{scene.controller.member.ports.pages}/v1/sessions/a-1"
        http = httpx.AsyncClient(trust_env=False, timeout=DEADLINE_S)
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, http_client=http) as client:
            messages: list[Any] = [QUESTION]
            for turn in range(3):
                await scene.gate.open(WeightVersion(2 * turn, 1), pace=5)
                asked = asyncio.create_task(reply(client, messages, streams=streams))
                await scene.generating()
                await scene.switch(WeightVersion(2 * turn + 1, 1))
                messages.append(await asked)
                await scene.gate.close()  # the tool runs while the engines are off
                messages += [
                    {"role": "tool", "tool_call_id": each["id"], "content": "2 + 2 is 4"}
                    for each in messages[-1].get("tool_calls") or []
                ]
        assert "It is 8." == messages[-1]["content"]
        path = (await call(scene, "GET", "/a-1")).json()["trajectory"]
        spans = [WeightVersion.parse(span["version"]).step for span in path["weight_versions"]]
        assert [0, 1, 2, 3, 4, 5] == spans
        trained = [token for token, mask in zip(path["token_ids"], path["loss_mask"], strict=True) if mask]
        context = [token for token, mask in zip(path["token_ids"], path["loss_mask"], strict=True) if not mask]
        assert answer("") * 2 + "It is 8." == scene.job.chat.text(trained)
        assert scene.job.chat.text(context).count("2 + 2 is 4") == 2
        for span in path["weight_versions"]:
            for place in range(span["start"], span["end"]):
                expected = logp_of(WeightVersion.parse(span["version"]), path["token_ids"][place])
                assert expected == pytest.approx(path["logprobs"][place])


async def reply(client: openai.AsyncOpenAI, messages: list[Any], *, streams: bool) -> dict[str, Any]:
    """The next message, put together by the client."""
    if not streams:
        completion = await client.chat.completions.create(model="job", messages=messages, tools=TOOLS)
        message: dict[str, Any] = completion.choices[0].message.model_dump(exclude_none=True)
        return message
    message = {"role": "assistant", "content": ""}
    stream = await client.chat.completions.create(model="job", messages=messages, tools=TOOLS, stream=True)
    async for chunk in stream:
        delta = chunk.choices[0].delta
        message["content"] += delta.content or ""
        message.setdefault("tool_calls", []).extend(each.model_dump() for each in delta.tool_calls or [])
    return message


async def test_an_episode_of_the_job_has_the_experts_that_read_each_token_last(tmp_path: Path) -> None:
    """A switch interrupts its newest turn, whose prompt the engine reads again. A client's session has none."""
    async with gateway_running(tmp_path, counting, maxResponseTokens=200, routerReplay=True) as scene:
        sessions = scene.controller._gateway._sessions
        session = sessions.open(lambda _: None)
        episode = ConversingAgent(scene, session.id)
        await scene.gate.open(V0)
        await episode.ask(QUESTION)
        await ConversingAgent(scene, "client").ask(QUESTION)
        assert [True, False] == ["return_routed_experts" in request for request in scene.gate.requests]
        scene.gate.pace = 4
        asked = asyncio.create_task(episode.ask(AND, extra_body={"return_routed_experts": True}))
        await scene.generating()
        await scene.switch(V1)
        answer = extra(await asked)["routed_experts"]
        trajectory, _ = sessions.take(session, RewardAnswer(reward=1.0), ending="trained")

    assert trajectory.experts is not None
    read = trajectory.tokens.ids.tolist()[:-1]
    assert [experts_of(V1, token) for token in read] == trajectory.experts.tolist()
    given = np.frombuffer(base64.b64decode(answer["data"]), "<i4").reshape(answer["rows"], answer["width"]).tolist()
    assert (len(read), experts_of(V0, read[0])) == (len(given), given[0]), "who asks gets the first reading"


# ---------------------------------------------------------------------------------------------------- rewards
async def test_sessions_with_rewards_become_a_group_of_a_batch(tmp_path: Path) -> None:
    """Prompts that are not the same have their difference as context; a dropped path is counted."""
    async with gateway_running(tmp_path, counting, batchSize=1, groupSize=2) as scene:
        await scene.gate.open(V0)
        agents = [ConversingAgent(scene, f"s{number}") for number in range(2)]
        for number, agent in enumerate(agents):
            await agent.ask({"role": "user", "content": f"Where is {number}?"})
            await agent.ask(AND)
        agents[1].messages.pop()
        await agents[1].ask()
        shown = [await agent.shown() for agent in agents]
        figures = {"tools": 2.0}
        assert 400 == (await agents[0].reward(1.0, figures={"of no name": 1.0})).status_code
        assert 200 == (await agents[0].reward(1.0, figures=figures)).status_code
        assert 200 == (await agents[0].reward(1.0, figures=figures)).status_code, "again, because the answer was lost"
        assert 409 == (await agents[0].reward(0.5, figures=figures)).status_code
        assert 409 == (await agents[0].reward(1.0)).status_code
        held = (await call(scene, "GET", "")).json()
        assert 2 == held["group_size"]
        assert [("s0", 2, 1.0, "g"), ("s1", 3, None, None)] == [
            (session["id"], session["turns"], session["reward"], session["group"]) for session in held["data"]
        ]
        patient = replace(scene, client=scene.client.with_options(max_retries=2))
        with pytest.raises(openai.ConflictError, match="has its reward"):
            await ConversingAgent(patient, "s0").ask(AND)
        assert 3 == scene.figure("refused_total", status="409"), "the client does not ask again what can't change"
        assert 200 == (await agents[1].reward(0.0)).status_code
        facts = await scene.operator.until(lambda facts: facts.sealed is not None)
        assert facts.sealed is not None
        assert (1, 2) == (facts.sealed.groups, facts.sealed.samples)
        assert 404 == (await call(scene, "GET", "/s0")).status_code, "it is samples now"
        assert 200 == (await agents[0].reward(1.0, figures=figures)).status_code, "again: the answer may be lost"
        assert 409 == (await agents[0].reward(0.5, figures=figures)).status_code
        rows: dict[int, tuple[list[int], list[int], float]] = {}
        tools: dict[float, float] = {}
        for shard in range(2):
            async with httpx.AsyncClient(verify=False, trust_env=False, timeout=DEADLINE_S) as http:
                body = await http.get(
                    f"https://127.0.0.1:{scene.controller.member.ports.data}/v1/batches/1?shard={shard}",
                    headers={"Authorization": scene.job.tls.authorization},
                )
            columns = load(body.content)
            start = 0
            for place, end in enumerate(columns["sample_end"].tolist()):
                reward = float(columns["reward"][place])
                tools[reward] = float(columns["figures"][place, 0])
                rows[int(reward)] = (
                    columns["tokens"][start:end].tolist(),
                    columns["loss_mask"][start:end].tolist(),
                    float(columns["group_mean"][place]),
                )
                start = end
        for path, reward in zip([each["trajectory"] for each in shown], (1, 0), strict=True):
            ids, mask, mean = rows[reward]
            assert [*path["prompt_token_ids"], *path["token_ids"]] == ids
            assert [*[0] * len(path["prompt_token_ids"]), *path["loss_mask"]] == mask
            assert 0.5 == mean
        assert {1.0: 2.0, 0.0: pytest.approx(float("nan"), nan_ok=True)} == tools
        assert facts.sealed.loss_tokens == sum(sum(mask) for _, mask, _ in rows.values())
        dropped = scene.registry.get_sample_value(
            "colocate_rollout_discarded_tokens_total", {"reason": "SessionOtherPath"}
        )
        assert len("Answer 2.") + 1 == dropped
        assert 2 == scene.figure("sessions_ended_total", ending="trained")


async def test_a_session_with_stale_tokens_is_trained_without_these_where_the_job_masks_them(tmp_path: Path) -> None:
    """It was dropped, though samples of the same age are masked: a session of many turns lasts over many steps."""
    rules: dict[str, Any] = {"batchSize": 1, "groupSize": 2, "maxStaleness": 0, "atMaxStaleness": "Mask"}
    async with gateway_running(tmp_path, counting, **rules) as scene:
        await scene.gate.open(V0)
        agents = [ConversingAgent(scene, f"s{number}") for number in range(2)]
        for agent in agents:
            await agent.ask(QUESTION)
        await scene.operator.send(1, (scene.gate.endpoint,), trained_step=1)
        await scene.operator.until(lambda facts: facts.trained_step == 1)
        await scene.switch(V1)
        for agent in agents:
            await agent.ask(AND)
        shown = [await agent.shown() for agent in agents]
        for agent in agents:
            assert 200 == (await agent.reward(1.0)).status_code
        facts = await scene.operator.until(lambda facts: facts.sealed is not None)
        assert facts.sealed is not None
        spans = [span for each in shown for span in each["trajectory"]["weight_versions"]]
        young = [span["end"] - span["start"] for span in spans if span["version"] == str(V1)]
        assert (2, 2, 2, sum(young)) == (facts.sealed.step, facts.sealed.samples, len(young), facts.sealed.loss_tokens)
        assert not scene.figure("sessions_ended_total", ending="TooStale")


async def test_sessions_survive_the_loss_of_the_process(tmp_path: Path) -> None:
    """Every turn that a client was answered is durable: the copy is what a kill would leave."""
    async with gateway_running(tmp_path / "a", counting) as scene:
        await scene.gate.open(V0)
        agent, other = ConversingAgent(scene), ConversingAgent(scene, "other")
        await agent.ask(QUESTION)
        await other.ask(QUESTION)
        await other.reward(1.0)
        shutil.copytree(tmp_path / "a" / "state", tmp_path / "b" / "state")
        before = await agent.shown(), await other.shown()
    async with gateway_running(tmp_path / "b", counting) as scene:
        await scene.gate.open(V1)
        agent.scene = other.scene = scene
        assert before == (await agent.shown(), await other.shown())
        await agent.ask(AND)
        shown = await agent.shown()
        assert (2, 1) == (shown["turns"], shown["paths"])
        assert [str(V0), str(V1)] == [span["version"] for span in shown["trajectory"]["weight_versions"]]
        assert 200 == (await agent.reward(0.0)).status_code
        await until(lambda: scene.figure("sessions_ended_total", ending="trained") == 2)


async def test_requests_that_a_session_cannot_take_are_refused(scene: GatewayScene) -> None:
    agent = ConversingAgent(scene)
    with pytest.raises(openai.BadRequestError, match="turns of a session use that") as refused:
        await agent.ask(QUESTION, temperature=0.5)
    assert "temperature" == refused.value.param
    assert 404 == (await agent.reward(1.0)).status_code, "no answered turn"
    assert 404 == (await call(scene, "POST", "/nobody/reward", {"reward": 1, "group": "g"})).status_code
    for body in ({}, {"reward": 1}, {"reward": "much", "group": "g"}, {"reward": 1, "group": ""}, [1]):
        answer = await call(scene, "POST", "/s/reward", body)
        assert (400, "invalid_request_error") == (answer.status_code, answer.json()["error"]["type"])
    with pytest.raises(openai.BadRequestError, match="a session is named by"):
        await scene.ask(extra_headers={"X-Session-ID": "a b"})
    await scene.gate.close()
    asking = asyncio.create_task(scene.ask(extra_headers={"X-Session-ID": "s"}))
    await until(lambda: scene.figure("parked") == 1)
    assert "session_busy" == (await agent.reward(1.0)).json()["error"]["code"]
    assert 200 == (await call(scene, "DELETE", "/s")).status_code
    await scene.gate.open(V0)
    with pytest.raises(openai.ConflictError, match="ended before this turn did"):
        await asking
    assert 0 == scene.figure("sessions")


async def test_a_session_is_no_longer_than_what_a_trainer_was_promised(tmp_path: Path) -> None:
    """Its path is trained in one piece: one that outgrew the trainer's memory would fail every retry of its batch."""
    async with gateway_running(tmp_path, counting, maxPromptTokens=40, maxResponseTokens=60) as scene:
        await scene.gate.open(V0)
        agent = ConversingAgent(scene)
        await agent.ask(QUESTION)
        with pytest.raises(openai.BadRequestError, match="leave room for") as refused:
            await agent.ask({"role": "user", "content": "And? " * 20})
        assert "context_length_exceeded" == refused.value.code
        await scene.ask({"role": "user", "content": "And? " * 20})
        agent.messages.pop()
        await agent.ask(AND)
        (_, _, last) = scene.gate.requests
        asked = len(last["input_ids"]) + last["sampling_params"]["max_new_tokens"]
        assert asked == 100, "without a limit of its own a turn gets what is left"
        assert 100 >= len((await agent.shown())["trajectory"]["token_ids"])


async def test_an_answer_is_not_resumed_into_another_session(scene: GatewayScene) -> None:
    one, other = ConversingAgent(scene, "one"), ConversingAgent(scene, "other")
    await one.ask(QUESTION)
    other.messages = json.loads(json.dumps(one.messages))
    await other.ask(AND)
    assert (1, 1) == ((await one.shown())["turns"], (await other.shown())["turns"])
    assert "Answer 1." in scene.job.chat.text((await other.shown())["trajectory"]["prompt_token_ids"])
    assert 1 == extra(await scene.ask())["segments"], "one without a session is not recorded"


async def test_a_session_keeps_its_engine_while_that_is_open(tmp_path: Path) -> None:
    """It has the prefix. A gate that closes is left at once, one that is named no more is forgotten, and both are taken
    again when they open.
    """
    async with gateway_running(tmp_path, counting, maxPromptTokens=2000) as scene:
        other = FakeGate("job-gpu-1-0", scene.job.tls, ScriptedConversation(tmp_path / "model", counting))
        async with other.listening():
            gates = scene.gate, other
            agent = ConversingAgent(scene)

            async def name(*named: FakeGate) -> None:
                await scene.operator.send(1, [gate.endpoint for gate in named])
                is_open = {gate.name for gate in named if gate.is_open}
                await until(lambda: is_open == {engine.name for engine in scene.controller._engines.open})

            async def engine_of_a_turn() -> FakeGate:
                before = [len(gate.requests) for gate in gates]
                await agent.ask(QUESTION)
                (taken,) = [gate for gate, count in zip(gates, before, strict=True) if len(gate.requests) > count]
                return taken

            for gate in gates:
                await gate.open(V0)
            await name(*gates)
            kept = await engine_of_a_turn()
            assert {kept} == {await engine_of_a_turn() for _ in range(4)}
            (another,) = {*gates} - {kept}
            await kept.close()
            await name(*gates)
            assert {another} == {await engine_of_a_turn() for _ in range(2)}
            await kept.open(V1)
            await name(*gates)
            assert {another} == {await engine_of_a_turn() for _ in range(2)}, "the first is as idle, and not its own"
            await name(kept)
            assert kept is await engine_of_a_turn()
            assert (0, 0) == (kept.refused, another.refused), "nobody was asked while it was closed"
