"""A job as the rollout controller sees it: a small model's directory, its job file, gates, and an operator's end."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from waiting import DEADLINE_S

from colocated_rl_api import names
from colocated_rl_api.facts import RolloutFacts
from colocated_rl_api.job import ColocatedRLJobSpec, Evaluation, EvaluationSet
from colocated_rl_api.member_wire import (
    Endpoint,
    Goal,
    Hello,
    JobFile,
    Refusal,
    RolloutTarget,
    from_member,
)
from colocated_rl_member.tls import MemberTls
from colocated_rl_rollout.rewards.rewards import TaskProcesses
from colocated_rl_rollout.rules.chat import Chat
from fakes.authority import FakeAuthority

JOB_UID = names.JobUid("6f0d1c52-8a35-4a7c-9d55-0c8a3f1b2e4d")
TOKEN = "d" * 32
MARK = "Answer: "
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PROMPT_END = "<|im_start|>assistant\n"


def write_model(directory: Path) -> Path:
    """A directory with a byte tokenizer and a chat template, and no weights."""
    directory.mkdir(parents=True, exist_ok=True)
    alphabet = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(alphabet)}, []))
    tokenizer.add_special_tokens(alphabet[:3])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}')
    (directory / "config.json").write_text('{"eos_token_id": 2}')
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return directory


def of_one_set(**rules: Any) -> Evaluation:
    """An evaluation of the held-out prompts."""
    return Evaluation(sets=[EvaluationSet(name="held-out", **rules)])


def make_spec(**rollout: Any) -> ColocatedRLJobSpec:
    """Chain sums of one-digit terms; batches of 3 groups of 2."""
    fields: dict[str, Any] = {
        "prompts": {
            "reasoningGym": {
                "name": "chain_sum",
                "config": {"min_terms": 2, "max_terms": 4, "min_digits": 1, "max_digits": 1},
                "size": 1000,
                "answerAfter": MARK,
            }
        },
        "maxPromptTokens": 200,
        "maxResponseTokens": 48,
        "batchSize": 3,
        "groupSize": 2,
        **rollout,
    }
    return ColocatedRLJobSpec.model_validate(
        {
            "steps": 20,
            "replicas": 2,
            "model": {"claim": {"name": "model"}},
            "gpus": {"count": 0},
            "rollout": fields,
            "evaluation": {"sets": [{"name": "held-out", "samples": 8}]},
        }
    )


class WorkedSums:
    """Answers maps each prompt to the fake engine's answer: the worked sum, wrong for every third question.

    `tail` makes answers longer, by text that comes before the answer.
    """

    def __init__(self, model: Path, *, tail: int = 0) -> None:
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._end = self._tokenizer.encode("<|im_end|>").ids[0]
        self._prompt_end: list[int] = self._tokenizer.encode(PROMPT_END).ids
        self._tail = tail

    def __call__(self, input_ids: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        start = next(
            place
            for place in range(len(input_ids), 0, -1)
            if list(input_ids[place - len(self._prompt_end) : place]) == self._prompt_end
        )
        question = self._tokenizer.decode(list(input_ids[:start]))
        return [*self.ids(question), self._end], input_ids[start:]

    def ids(self, question: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(self.text(question)).ids
        return ids

    def text(self, question: str) -> str:
        found = re.search(r"problem: (.*) =", question)
        assert found, question
        value = eval(found[1])
        wrong = len(question) % 3 == 0
        return "." * self._tail + MARK + str(value + wrong)


class OperatorEnd:
    """The operator's end of one link: the newest facts, and targets of a scripted operator."""

    def __init__(self, link: aiohttp.ClientWebSocketResponse) -> None:
        self._link = link
        self._changed = asyncio.Condition()
        self.hello: Hello | None = None
        self.facts: RolloutFacts | None = None
        self.refusals: list[Refusal] = []
        self.heard: list[str] = []  # all messages, as they came

    async def receive(self) -> None:
        async for message in self._link:
            self.heard.append(message.data)
            received = from_member.validate_json(message.data)
            async with self._changed:
                match received:
                    case Hello():
                        self.hello = received
                    case RolloutFacts():
                        self.facts = received
                    case Refusal():
                        self.refusals.append(received)
                    case _:
                        raise AssertionError(f"not of a rollout controller: {received}")
                self._changed.notify_all()

    async def send(self, epoch: int, engines: Sequence[Endpoint], **fields: Any) -> None:
        defaults: dict[str, Any] = {"goal": Goal.CLIMB, "trained_step": 0, "saved_step": 0}
        target = RolloutTarget(epoch=epoch, engines=tuple(engines), **{**defaults, **fields})
        await self._link.send_str(target.model_dump_json(by_alias=True))

    async def until(self, condition: Callable[[RolloutFacts], object], deadline_s: float = DEADLINE_S) -> RolloutFacts:
        """Facts for which the condition holds."""
        try:
            async with asyncio.timeout(deadline_s), self._changed:
                await self._changed.wait_for(lambda: self.facts is not None and condition(self.facts))
        except TimeoutError:
            raise AssertionError(f"not within {deadline_s} s; newest facts: {self.facts}") from None
        assert self.facts is not None
        return self.facts


@dataclass(frozen=True)
class JobOnDisk:
    """Everything that a pod of the rollout controller has mounted."""

    directory: Path
    authority: FakeAuthority
    spec: ColocatedRLJobSpec

    @classmethod
    def write(cls, directory: Path, spec: ColocatedRLJobSpec) -> JobOnDisk:
        authority = FakeAuthority()
        authority.member_directory(directory / "tls", job_uid=JOB_UID, token=TOKEN)
        write_model(directory / "model")
        job = JobFile(name="job", namespace="default", uid=JOB_UID, created=datetime.now(UTC), spec=spec)
        (directory / "job.json").write_text(job.model_dump_json(by_alias=True))
        return cls(directory, authority, spec)

    @property
    def arguments(self) -> list[str]:
        """Return the arguments of the controller's command line, with free ports."""
        return [
            *("--job-file", str(self.directory / "job.json"), "--state", str(self.directory / "state")),
            *("--recorded", str(self.directory / "recorded"), "--former", str(self.directory / "former")),
            *("--former-samples", str(self.directory / "former-samples")),
            *("--tls", str(self.directory / "tls"), "--models", str(self.directory / "model"), "--host", "127.0.0.1"),
            *("--control-port", "0", "--data-port", "0", "--metrics-port", "0", "--pages-port", "0"),
            *(
                "--tasks",
                str(self.tasks),
                "--task-processes",
                "1",
                "--drain-seconds",
                "2",
                "--progress-seconds",
                "0.05",
            ),
        ]

    @property
    def tasks(self) -> Path:
        """Return the socket on which the task server listens, if there is one."""
        return self.directory / "tasks.sock"

    @property
    def environment(self) -> dict[str, str]:
        return {names.ENV_POD_NAME: "job-rollout-0-0", names.ENV_POD_UID: "uid-rollout"}

    @property
    def tls(self) -> MemberTls:
        return MemberTls.read(self.directory / "tls")

    @property
    def chat(self) -> Chat:
        return Chat(self.directory / "model")

    @asynccontextmanager
    async def operator(self, control_port: int) -> AsyncIterator[OperatorEnd]:
        """The operator connects to the controller and listens."""
        context = self.authority.client_context(self.directory / "operator")
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(
                f"https://127.0.0.1:{control_port}/v1/link",
                ssl=context,
                server_hostname=names.member_server_name(JOB_UID),
            ) as link,
        ):
            end = OperatorEnd(link)
            receiver = asyncio.create_task(end.receive(), name="operator/receive")
            try:
                yield end
            finally:
                receiver.cancel()
                await asyncio.wait([receiver])

    async def fetch(self, session: aiohttp.ClientSession, data_port: int, path: str) -> tuple[int, bytes, str | None]:
        """Status, body and digest header of a GET at the data port, with the data token."""
        async with session.get(
            f"https://127.0.0.1:{data_port}{path}",
            ssl=self.tls.client_context(),
            server_hostname=names.member_server_name(JOB_UID),
            headers={"Authorization": self.tls.authorization},
        ) as response:
            return response.status, await response.read(), response.headers.get("X-Content-SHA256")


class ScriptedConversation(WorkedSums):
    """Scripted answers a conversation, which is given as text without its special tokens.

    As text, or as tokens that no text would become.
    """

    def __init__(self, model: Path, answer: Callable[[str], str | list[int]]) -> None:
        super().__init__(model)
        self._answer = answer

    def ids(self, question: str) -> list[int]:
        answer = self._answer(question)
        ids: list[int] = answer if isinstance(answer, list) else self._tokenizer.encode(answer).ids
        return ids


class SilentProcesses(TaskProcesses):
    """Task processes that never start: the controller has no prompts of its own."""

    def __init__(self, spec: ColocatedRLJobSpec, directory: Path) -> None:
        super().__init__(spec.rollout.prompts, count=1, socket=directory / "tasks.sock")
