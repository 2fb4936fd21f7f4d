"""Read a job's samples, batches and evaluations from its rollout controller, or from a reader of its store."""

from __future__ import annotations

import asyncio
import json
import textwrap
from collections.abc import AsyncGenerator, Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from colocated_rl_api import names
from colocated_rl_cli.base.errors import (
    CliError,
    NotAllowed,
    NotReached,
    ObjectMissing,
    UsageError,
)
from colocated_rl_cli.base.output import document, row_of, table
from colocated_rl_cli.cluster import reader
from colocated_rl_cli.cluster.api import Api
from colocated_rl_cli.cluster.pages import opened, page, read_json
from colocated_rl_cli.evidence.evidence import is_at_rest, is_over

PAGE = "/v1/samples"
LINES = "application/x-ndjson"
PARQUET = "application/vnd.apache.parquet"
BEGINS_AFTER = "x-begins-after"
RETRY_S, RETRY_AT_MOST_S = 0.5, 8.0
COLUMNS = {"id": 8, "group_id": 8, "state": 11, "reward": 9, "finish": 6, "attempts": 8, "step": 5, "reason": 6}

Row = Mapping[str, Any]


class _SampleShown(BaseModel):
    """Says what commands read of a sample: a pod shows whatever somebody in it wants."""

    id: int
    state: str
    reward: Annotated[float, Field(allow_inf_nan=False)] | None
    prompt: str | None = None
    response: str | None = None


class _EndedShown(_SampleShown):
    ended: int


class _StepShown(BaseModel):
    step: int


class _EvaluationShown(_StepShown):
    name: str


_SAMPLES, _ENDED = TypeAdapter(list[_SampleShown]), TypeAdapter(_EndedShown)
_BATCHES, _EVALUATIONS = TypeAdapter(list[_StepShown]), TypeAdapter(list[_EvaluationShown])


async def newest(api: Api, job: str, query: Mapping[str, str]) -> list[Row]:
    """Return the newest samples that match the query. Raises CliError."""
    pod = await rollout_pod(api, job)
    return [*_rows(_SAMPLES, await page(api, pod, PAGE, query), "samples", pod)]


async def batches(api: Api, job: str) -> list[Row]:
    """Return the record of each batch, the oldest first. Raises CliError."""
    pod, found, after = await rollout_pod(api, job), list[Row](), 0
    while more := _rows(_BATCHES, await page(api, pod, "/v1/batches", {"after": str(after)}), "batches", pod):
        if more[-1]["step"] <= after:
            raise NotReached(f"pod {pod} shows batches up to step {after} again and again")
        found, after = [*found, *more], more[-1]["step"]
    return found


async def evaluations(api: Api, job: str) -> list[dict[str, Any]]:
    """Return every evaluation, the oldest first. Raises CliError."""
    pod = await rollout_pod(api, job)
    return _rows(_EVALUATIONS, await page(api, pod, "/v1/evaluations"), "evaluations", pod)


async def followed(
    api: Api, job: str, query: Mapping[str, str], *, report: Callable[[str], None]
) -> AsyncGenerator[Row, None]:
    """Yield each sample once, as it ends, until the job is over or gone.

    A broken connection (port-forward, pod, API server) is reported and made again, from the last sample on. Raises
    CliError if it can't begin.
    """
    after: int | None = None
    reported, wait_s = "", RETRY_S
    while True:
        trouble = ""
        try:
            going_on = {} if after is None else {"after": str(after)}
            pod = await rollout_pod(api, job)
            async with opened(api, pod, PAGE, query={"follow": "true", **query, **going_on}) as answer:
                if not answer.headers.get("content-type", "").startswith(LINES):
                    raise ObjectMissing(f"pod {pod} is of an earlier release, whose samples can't be followed")
                after = _place(answer.headers.get(BEGINS_AFTER, ""), pod)
                reported, wait_s = "", RETRY_S
                async for line in answer.lines():
                    if line:
                        row = _ended(read_json(line, f"a sample of pod {pod}"), pod)
                        if "state" not in query and row["ended"] > after + 1:
                            report(
                                f"{row['ended'] - after - 1} that ended before are in a checkpoint, and only counted"
                            )
                        after = row["ended"]
                        yield row
        except NotAllowed:
            raise
        except CliError as error:
            if after is None:
                raise
            trouble = str(error)
        ends = await _is_over(api, job)
        if trouble not in ("", reported):
            reported = trouble
            report(trouble if ends else f"{trouble}; it is asked again")
        if ends:
            return
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, RETRY_AT_MOST_S)


async def download(api: Api, job: str, query: Mapping[str, str], file: Path) -> int:
    """Write all samples to a Parquet file; return its size in bytes.

    Raises CliError, and UsageError if the file can't be written.
    """
    pod, unfinished = await rollout_pod(api, job), file.with_name(f"{file.name}.part")
    try:
        async with opened(api, pod, PAGE, query={"format": "parquet", **query}) as answer:
            if not answer.headers.get("content-type", "").startswith(PARQUET):
                raise ObjectMissing(f"pod {pod} is of an earlier release, which writes no Parquet files")
            written = 0
            with unfinished.open("wb") as part:
                async for piece in answer.body():
                    written += part.write(piece)
        unfinished.replace(file)
        return written
    except OSError as error:
        raise UsageError(f"{file} can't be written: {error}") from error
    finally:
        unfinished.unlink(missing_ok=True)


async def _is_over(api: Api, job: str) -> bool:
    try:
        return is_over(await api.job(job))
    except ObjectMissing:
        return True
    except NotReached:
        return False  # unknown: go on following


async def rollout_pod(api: Api, job: str) -> str:
    """Return the name of the running rollout pod, or reader. Raises ObjectMissing, which says how to get one."""
    found = await api.job(job)
    of_rollout = (
        pod for pod in await api.pods_of(job) if pod["metadata"]["labels"].get(names.ROLE_LABEL) == names.ROLE_ROLLOUT
    )
    for pod in (*of_rollout, *await reader.pods(api, job)):
        if pod["status"].get("phase") == "Running":
            return str(pod["metadata"]["name"])
    if is_at_rest(found):
        how = "over" if is_over(found) else "suspended" if found["spec"].get("suspend") else "queued"
        why = f"is {how}, and has no pods: kubectl crlj reader {job} makes one that serves its samples"
    else:
        why = f"has no rollout pod that runs: kubectl crlj explain {job} shows why"
    raise ObjectMissing(f"job {api.namespace}/{job} {why}")


def _rows(kind: TypeAdapter[Any], shown: Row, name: str, pod: str) -> list[dict[str, Any]]:
    """Return the rows of a page. Raises NotReached if they have another form than commands read."""
    rows: Any = shown.get(name)
    _check(kind, rows, name, pod)
    found: list[dict[str, Any]] = rows
    return found


def _ended(row: Any, pod: str) -> Row:
    """Return a row of a stream. Raises NotReached if it has another form."""
    _check(_ENDED, row, "samples", pod)
    found: Row = row
    return found


def _check(kind: TypeAdapter[Any], value: Any, name: str, pod: str) -> None:
    try:
        kind.validate_python(value)
    except ValidationError as error:
        wrong = ".".join(map(str, error.errors(include_url=False, include_input=False)[0]["loc"]))
        raise NotReached(f"pod {pod} shows {name} of another form{f', see {wrong}' if wrong else ''}") from error


def _place(text: str, pod: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise NotReached(f"pod {pod} does not say where its samples begin")
    return int(text)


def listed(rows: list[Row], form: str, *, text: bool) -> str:
    """Return samples as text, JSON or YAML. text: with prompts and responses."""
    if form != "text":
        return document(rows, form)
    return "\n\n".join(_in_words(row) for row in rows) if text else table(rows, [*COLUMNS])


def listed_one(row: Row, form: str, *, text: bool) -> str:
    """Return one sample of a stream: a line of JSON, or an item of a YAML list."""
    match form:
        case "json":
            return json.dumps(row)
        case "yaml":
            return document([row], form)
        case _:
            return _in_words(row) + "\n" if text else row_of(row, COLUMNS)


def head(form: str, *, text: bool) -> str | None:
    """Return the heading above streamed rows, if their form has one."""
    return row_of({name: name.upper() for name in COLUMNS}, COLUMNS) if form == "text" and not text else None


def _in_words(row: Row) -> str:
    reward = "-" if row["reward"] is None else f"{row['reward']:.4g}"
    texts = [textwrap.indent(row.get(name) or "-", "    ") for name in ("prompt", "response")]
    return f"{row['id']}: {row['state']}, reward {reward}\n  prompt\n{texts[0]}\n  response\n{texts[1]}"
