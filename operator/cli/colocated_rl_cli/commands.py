"""Run the commands, a function each: arguments in, exit code out. A failure is raised as a CliError."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Awaitable, Callable, Container, Mapping
from contextlib import aclosing, nullcontext
from dataclasses import asdict, replace
from datetime import UTC, datetime
from operator import itemgetter
from pathlib import Path
from typing import Any

from colocated_rl_api import faults, names
from colocated_rl_api.faults import LASTING, FaultKind, InjectedFault
from colocated_rl_api.job_status import Phase
from colocated_rl_cli import completion
from colocated_rl_cli.base.errors import CliError, Exit, NotAllowed, ObjectMissing, UsageError
from colocated_rl_cli.base.output import (
    document,
    print_error,
    print_out,
    table,
)
from colocated_rl_cli.base.yaml_text import MAX_BYTES
from colocated_rl_cli.cluster import reader, samples
from colocated_rl_cli.cluster.api import Api
from colocated_rl_cli.cluster.following import JobWatch
from colocated_rl_cli.cluster.gpu_seconds import gpu_hours
from colocated_rl_cli.cluster.kubectl import Login
from colocated_rl_cli.cluster.pages import of_each, post, states
from colocated_rl_cli.draw import costs, timeline
from colocated_rl_cli.draw.figures import best_of, read_figures, standings
from colocated_rl_cli.draw.trace import trace
from colocated_rl_cli.draw.view import frame
from colocated_rl_cli.evidence.evidence import Evidence, has_pages, is_at_rest, is_over
from colocated_rl_cli.evidence.gpu_hours import GpuHours
from colocated_rl_cli.evidence.kept import kept_lines
from colocated_rl_cli.evidence.records import Records, read_line
from colocated_rl_cli.explain.explanation import Explanation, explain
from colocated_rl_cli.live import Terminal, shown
from colocated_rl_cli.manifest import one_side, questions, starter
from colocated_rl_cli.manifest.manifest import ManifestVerdict, judge
from colocated_rl_cli.support import bundle

MANY_PODS = 64  # at most so many members' pages are read by `explain`
ENGINE_ROLES = (names.ROLE_GPU, names.ROLE_ENGINE)
TRAINER_ROLES = (names.ROLE_GPU, names.ROLE_TRAINER)
MANY_EVENTS = 10  # and the events of so many pending pods


def run(args: Namespace) -> Exit:
    """Run the command that the arguments name. Raises CliError, and KeyboardInterrupt on Ctrl-C."""
    outcome = RUN[args.command](args)
    return outcome if isinstance(outcome, Exit) else asyncio.run(_until_signal(outcome))


async def _until_signal(outcome: Awaitable[Exit]) -> Exit:
    """End a command on SIGTERM, or when its terminal goes away, as on Ctrl-C: restore the screen and stop kubectl."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        return await outcome
    except asyncio.CancelledError:
        return Exit.INTERRUPTED


def login(args: Namespace) -> Login:
    """Return the login to the cluster that the arguments and the environment name."""
    return Login.of(args.environment, kubeconfig=args.kubeconfig, context=args.context)


# ---------------------------------------------------------------------------------------------- without a cluster
def print_script(args: Namespace) -> Exit:
    print_out(completion.SCRIPTS[args.shell])
    return Exit.FINE


def validate(args: Namespace) -> Exit:
    verdicts = {name: judge(_text_of(name)) for name in args.file}
    if args.output == "text":
        for name, verdict in verdicts.items():
            _print_verdict(name, verdict)
    else:
        print_out(document([{"file": name, **_verdict(verdict)} for name, verdict in verdicts.items()], args.output))
    return Exit.FINE if all(verdict.is_accepted for verdict in verdicts.values()) else Exit.PROBLEM


def _print_verdict(name: str, verdict: ManifestVerdict) -> None:
    for fault in verdict.faults:
        field = f"{fault.field}: " if fault.field else ""
        print_out(f"{name}:{fault.place.line}:{fault.place.column}: {field}{fault.message}")
    if verdict.is_accepted:
        passed = f" ({verdict.others} objects of other kinds not looked at)" if verdict.others else ""
        print_out(f"{name}: fine: {', '.join(verdict.jobs)}{passed}")


def _verdict(verdict: ManifestVerdict) -> dict[str, Any]:
    faults = [{**asdict(fault.place), "field": fault.field, "message": fault.message} for fault in verdict.faults]
    return {"accepted": verdict.is_accepted, "jobs": list(verdict.jobs), "faults": faults}


def _text_of(name: str) -> str:
    """Return the text of a file, or of standard input; read at most one byte more than a manifest may have."""
    try:
        with nullcontext(sys.stdin.buffer) if name == "-" else Path(name).open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        return content.decode(errors="strict" if len(content) <= MAX_BYTES else "replace")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{name} can't be read: {error}") from error


def init(args: Namespace) -> Exit:
    _refuse_to_replace(args)
    return _hand_over(starter.manifest(questions.wishes_from(args)), args)


def _refuse_to_replace(args: Namespace) -> None:
    """Raise UsageError if the output file exists and may not be replaced: before anything is asked or read."""
    if args.file is not None and not args.force and Path(args.file).exists():
        raise UsageError(_exists(args.file))


def _exists(file: str) -> str:
    return f"{file} exists already: name another file, or use --force to replace it"


def _hand_over(text: str, args: Namespace) -> Exit:
    """Write a manifest to the file that the arguments name, or to standard output."""
    if args.file is None:
        print_out(text.removesuffix("\n"))
        return Exit.FINE
    _write(args.file, text, replace=args.force)
    print_error(f"next: kubectl apply -f {args.file}")
    return Exit.FINE


# ------------------------------------------------------------------------------------------------------- one side alone
async def rollout_only(args: Namespace) -> Exit:
    async with Api.reach(login(args), args.namespace) as api:
        job = await api.job(args.job)
    return _hand_over(one_side.rollout_only(job, name=args.name, steps=args.steps), args)


async def train_only(args: Namespace) -> Exit:
    async with Api.reach(login(args), args.namespace) as api:
        job = await api.job(args.job)
    return _hand_over(one_side.train_only(job, name=args.name, steps=args.steps, recorded=args.recorded), args)


# -------------------------------------------------------------------------------------------------------- looking at it
async def explain_job(args: Namespace) -> Exit:
    async with Api.reach(login(args), args.namespace) as api:
        explanation = await explained(api, args.job)
    if args.output == "text":
        print_out(explanation_text(explanation))
    else:
        print_out(document(_explanation(explanation), args.output))
    return Exit.PROBLEM if explanation.is_problem else Exit.FINE


def _explanation(found: Explanation) -> dict[str, Any]:
    """Return an explanation as plain data, for programs."""
    return {
        "job": found.job,
        "headline": found.headline,
        "isProblem": found.is_problem,
        "causes": [{**asdict(cause), **cause.remedy._asdict()} for cause in found.causes],
        "waitsFor": found.waits_for,
        "rungs": found.rungs,
        "warnings": found.warnings,
        "notes": found.notes,
    }


async def explained(api: Api, name: str) -> Explanation:
    """Explain a job from its objects, events, members' pages and newest log lines. Raises CliError."""
    job, pods = await api.job(name), await api.pods_of(name)
    running = [pod for pod in pods if pod.get("status", {}).get("phase") == "Running" and has_pages(pod)][:MANY_PODS]
    pending = [pod for pod in pods if pod.get("status", {}).get("phase") == "Pending"][:MANY_EVENTS]
    events: list[dict[str, Any]] = []
    unread: list[str] = []
    try:
        for one in (job, *pending):
            events += await api.events_about(one["metadata"]["uid"])
    except CliError as error:
        unread.append(str(error))  # a job is explained without them, too
    seen = await states(api, [pod["metadata"]["name"] for pod in running])
    since = await _since(api, running)
    job = await api.job(name)  # after the pages, so that they are hardly newer than the status
    return explain(Evidence(job, pods, events, seen, datetime.now(UTC), since, unread))


async def _since(api: Api, pods: list[dict[str, Any]]) -> dict[str, float]:
    """Return when each pod reached its present rung, by its newest log lines, in seconds since the epoch."""

    async def read(pod: dict[str, Any]) -> str:
        try:
            return await api.log(pod["metadata"]["name"], names.AGENT_CONTAINER, newest=200)
        except CliError:
            return ""  # then the time is left out

    texts = await asyncio.gather(
        *(read(pod) for pod in pods if pod["metadata"]["labels"].get(names.ROLE_LABEL) in names.GPU_ROLES)
    )
    lines = [line for text in texts for line in map(read_line, text.splitlines()) if line is not None]
    return {pod: stands.since for pod, stands in standings(lines).items()}  # the same on every ladder


def explanation_text(explanation: Explanation) -> str:
    """Return an explanation as text, for people."""
    lines = [f"{explanation.job}: {explanation.headline}"]
    if explanation.rungs:
        lines += ["", *(f"  {pod}: {rung}" for pod, rung in explanation.rungs.items())]
    for cause in explanation.causes:
        where = " ".join(part for part in (cause.pod, f"at {cause.rung}" if cause.rung else None) if part)
        lines += ["", f"{cause.reason}{f', {where}' if where else ''}: {cause.remedy.means}"]
        lines += [f"  message:{cause.message}"] if cause.message else []
        lines += [f"  to do:  {cause.remedy.do}"]
    if explanation.waits_for:
        lines += ["", f"Nothing is wrong. It waits for: {explanation.waits_for}"]
    if explanation.warnings:
        lines += ["", "Newest warnings:", *(f"  {one}" for one in explanation.warnings)]
    return "\n".join([*lines, *(f"\nnote: {note}" for note in explanation.notes)])


async def top(args: Namespace) -> Exit:
    async with Api.reach(login(args), args.namespace) as api:
        job = await api.job(args.job)
        if args.once or is_over(job):
            records = await _kept(api, args.job, job)
            Terminal().print(frame(job, records.lines, now=time.time()))
            return Exit.FINE
        watch = JobWatch(api, args.job)
        console = Terminal()
        async with shown(watch, console, screen=True):
            await watch.until_ended()
    if console.is_terminal:  # the last frame disappeared with the full screen
        console.print(frame(watch.job, watch.lines, now=time.time()))
    return Exit.FINE


async def show_samples(args: Namespace) -> Exit:
    if args.follow and args.parquet:
        raise UsageError("--parquet writes the samples that there are: without --follow")
    limit = args.limit if args.limit is not None or args.parquet else 20
    query = {"limit": str(limit)} if limit is not None else {}
    query |= ({"state": args.state} if args.state else {}) | ({"text": "1"} if args.text else {})
    async with Api.reach(login(args), args.namespace) as api:
        if args.parquet:
            size = await samples.download(api, args.job, query, Path(args.parquet))
            print_error(f"{args.parquet}: written, {size / 2**20:.1f} MiB")
            return Exit.FINE
        if not args.follow:
            print_out(samples.listed(await samples.newest(api, args.job, query), args.output, text=args.text))
            return Exit.FINE
        if above := samples.head(args.output, text=args.text):
            print_out(above)
        async with aclosing(samples.followed(api, args.job, query, report=print_error)) as rows:
            async for row in rows:
                print_out(samples.listed_one(row, args.output, text=args.text))
                sys.stdout.flush()  # the reader of a pipe gets each sample at once
    return Exit.FINE


async def read_samples(args: Namespace) -> Exit:
    async with Api.reach(login(args), args.namespace) as api:
        started = await reader.start(api, args.job, minutes=args.minutes)
        pod, minutes = started["metadata"]["name"], started["spec"]["activeDeadlineSeconds"] // 60
        there = shlex.join(["-n", api.namespace, *login(args).flags()])
        print_out(f"{api.namespace}/{args.job}: pod {pod} serves its samples, for {minutes} min from its start")
        print_out(f"  kubectl crlj samples {there} {args.job}")
        print_out(f"  kubectl port-forward {there} pod/{pod} {names.PAGES_PORT}    # the page, in a browser")
        print_out(f"  kubectl delete pod {there} {pod}    # sooner than that")
    return Exit.FINE


async def cost(args: Namespace) -> Exit:
    if args.job is None:
        return await _cost_of_all(args)
    if args.all_namespaces:
        raise UsageError("cost takes a job, or --all-namespaces")
    async with Api.reach(login(args), args.namespace) as api:
        hours = await gpu_hours(api, await api.job(args.job), costs.logged_seconds)
    for note in hours.notes:
        print_error(note)
    print_out(costs.text(hours) if args.output == "text" else document(costs.as_data(hours), args.output))
    return Exit.FINE


async def _cost_of_all(args: Namespace) -> Exit:
    async with Api.reach(login(args), args.namespace) as api:
        listed = await api.all_jobs(everywhere=args.all_namespaces)
        jobs = {f"{job['metadata']['namespace']}/{job['metadata']['name']}": job for job in listed}

        async def read(name: str) -> GpuHours:
            return await gpu_hours(api.within(name.partition("/")[0]), jobs[name], costs.logged_seconds)

        found = await of_each(jobs, read)
    known = {name: hours for name in jobs if isinstance(hours := found[name], GpuHours)}
    for name in jobs:
        notes = known[name].notes if name in known else [f"nobody answers: {found[name]}"]
        for note in notes:
            print_error(f"{name}: {note}")
    if args.output != "text":
        print_out(document([{"job": name, **costs.as_data(hours)} for name, hours in known.items()], args.output))
    elif jobs:
        print_out(costs.text_of_many(jobs, known, with_namespace=args.all_namespaces))
    else:
        print_out("there is no job" if args.all_namespaces else f"there is no job in namespace {api.namespace}")
    return Exit.NO_ANSWER if jobs and not known else Exit.FINE


async def evaluations(args: Namespace) -> Exit:
    async with Api.reach(login(args), args.namespace) as api:
        job = await api.job(args.job)
        records = await _kept(api, args.job, job)
        logged = read_figures(records.lines).evaluations
        stored = await _stored_evaluations(api, job) if is_at_rest(job) and not logged else []
    found = {(one.step, one.name): asdict(one) for one in logged}
    for newest in (*stored, *job.get("status", {}).get("evaluations", ())):  # which no readable log may have
        evaluated = {name: value for name, value in newest.items() if name != "bestOf"} | {"best_of": best_of(newest)}
        key = newest["step"], newest["name"]
        found[key] = {"ts": None, **found.get(key, {}), **evaluated}
    rows = sorted(found.values(), key=itemgetter("step"))
    if args.output == "text":
        counts = sorted({count for row in rows for count in row["best_of"]})
        flat = [
            row | {"set": row["name"]} | {f"best-of-{count}": mean for count, mean in row["best_of"].items()}
            for row in rows
        ]
        print_out(
            table(flat, ["step", "set", "mean", "stderr", *(f"best-of-{count}" for count in counts), "best", "samples"])
        )
    else:
        print_out(document(rows, args.output))
    return Exit.FINE


async def _stored_evaluations(api: Api, job: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return all evaluations of a job without pods, if a reader shows them."""
    if not job["spec"].get("evaluation"):
        return []
    try:
        return await samples.evaluations(api, job["metadata"]["name"])
    except CliError as error:
        print_error(f"the newest of each set alone: {error}")
        return []


# ------------------------------------------------------------------------------------------------------------- steering
async def suspend(args: Namespace) -> Exit:
    return await _steer(args, suspend=True, effect="its pods end and its devices are free; its volumes are kept")


async def resume(args: Namespace) -> Exit:
    return await _steer(args, suspend=False, effect="its pods are recreated, and it continues from where it stopped")


async def retry(args: Namespace) -> Exit:
    async with Api.reach(login(args), args.namespace) as api:
        job = await api.job(args.job)
        name, status = f"{api.namespace}/{args.job}", job.get("status", {})
        _refuse_deleted(job)
        if status.get("phase") != Phase.FAILED:
            print_error(f"{name}: it has not failed ({status.get('phase', 'not acted on')})")
            return Exit.PROBLEM
        retries = max(job["spec"].get("retries", 0), status.get("retries", 0)) + 1
        await api.change_job(args.job, {"spec": {"retries": retries, "suspend": False}})
    print_out(f"{name}: retried: its pods are recreated, and it continues from its newest checkpoint")
    return Exit.FINE


async def fault(args: Namespace) -> Exit:
    kind = FaultKind(args.kind)
    roles = TRAINER_ROLES if kind is FaultKind.TRAINER_CRASH else ENGINE_ROLES
    asked = InjectedFault(kind=kind, seconds=args.seconds)
    async with Api.reach(login(args), args.namespace) as api:
        await api.job(args.job)
        pods = [pod["metadata"]["name"] for pod in await api.pods_of(args.job) if _may_take(pod, roles)]
        pod = args.pod or next(iter(pods), "")
        if pod not in pods:
            raise ObjectMissing(
                f"{args.pod or args.job}: no pod that runs can have this fault: {', '.join(pods) or 'none'}"
            )
        try:
            await post(api, pod, faults.PATH, asked.model_dump_json(by_alias=True))
        except ObjectMissing as error:
            raise NotAllowed(
                f"pod {pod} takes no faults: it was made by an operator whose chart has faultInjection.enabled: false"
            ) from error
    lasts = f" for {asked.seconds:g} s" if kind in LASTING else ""
    print_out(f"{api.namespace}/{args.job}: pod {pod}: {kind}{lasts}")
    return Exit.FINE


def _may_take(pod: Mapping[str, Any], roles: Container[str]) -> bool:
    labels = pod["metadata"].get("labels", {})
    return pod.get("status", {}).get("phase") == "Running" and labels.get(names.ROLE_LABEL) in roles


def _refuse_deleted(job: Mapping[str, Any]) -> None:
    if since := job["metadata"].get("deletionTimestamp"):
        raise ObjectMissing(
            f"job {job['metadata']['name']} is being deleted, since {since}: nothing steers it any more"
        )


async def _steer(args: Namespace, *, suspend: bool, effect: str) -> Exit:
    async with Api.reach(login(args), args.namespace) as api:
        job = await api.job(args.job)
        name = f"{api.namespace}/{args.job}"
        _refuse_deleted(job)
        if is_over(job) and not (suspend and job["status"]["phase"] == Phase.FAILED):
            phase = job["status"]["phase"]
            then = f"kubectl crlj retry {args.job} continues it" if phase == Phase.FAILED else "make a new job"
            print_error(f"{name}: it is over ({phase}): {then}")
            return Exit.PROBLEM
        if bool(job["spec"].get("suspend")) is suspend:
            print_out(f"{name}: {'suspended' if suspend else 'not suspended'} already")
            return Exit.FINE
        await api.change_job(args.job, {"spec": {"suspend": suspend}})
    print_out(f"{name}: {'suspended' if suspend else 'resumed'}: {effect}")
    return Exit.FINE


# -------------------------------------------------------------------------------------------------------------- records
async def _kept(api: Api, name: str, job: Mapping[str, Any]) -> Records:
    watch = JobWatch(api, name)
    watch.job = job
    records = await watch.collect()
    for error in watch.unread:
        print_error(f"not complete: {error}")
    return records


async def show_timeline(args: Namespace) -> Exit:
    if (args.job is None) == (args.records is None):
        raise UsageError("timeline needs a job, or --records FILE")
    if args.records:
        records = _read_records(Path(args.records))
    else:
        async with Api.reach(login(args), args.namespace) as api:
            job = await api.job(args.job)
            records = await _kept(api, args.job, job)
            if is_at_rest(job) and not read_figures(records.lines).spans:
                lines = kept_lines(await samples.batches(api, args.job), records.ladder)
                records = replace(records, lines=lines)
    if args.html:
        _write(args.html, timeline.render(records))
    if args.trace:
        _write(args.trace, json.dumps(trace(records)))
    if args.save:
        _write(args.save, records.as_json())
    if not (args.html or args.trace or args.save):
        print_out(timeline.text(records, width=Terminal().width))
    return Exit.FINE


def _read_records(path: Path) -> Records:
    try:
        return Records.read(path)
    except (OSError, TypeError, ValueError) as error:
        raise UsageError(f"{path} holds no records of a job: {error}") from error


def _write(path: str, text: str, *, replace: bool = True) -> None:
    try:
        with Path(path).open("w" if replace else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise UsageError(_exists(path)) from error
    except OSError as error:
        raise UsageError(f"{path} can't be written: {error}") from error
    print_error(f"{path}: written")


def _new_file(name: str) -> Path:
    """Return the path of a file that can be made. Raises UsageError, before anything is read for it."""
    path = Path(name)
    if path.exists():
        raise UsageError(f"{path} exists already: name another file with --file")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UsageError(f"{path} can't be written: {path.parent} is no folder that you may write to")
    return path


async def make_bundle(args: Namespace) -> Exit:
    path = _new_file(args.file or f"{args.job}-bundle.tar.gz")
    async with Api.reach(login(args), args.namespace) as api:
        job = await api.job(args.job)

        async def explanation() -> str:
            return explanation_text(await explained(api, args.job))

        made = await bundle.collect(api, job, explanation, operator=args.operator)
    try:
        made.write(str(path))
    except OSError as error:
        raise UsageError(f"{path} can't be written: {error}") from error
    print_error(f"{path}: {len(made.names)} files; look at it before you send it: tar -tzf {path}")
    return Exit.FINE


RUN: dict[str, Callable[[Namespace], Exit | Awaitable[Exit]]] = {  # by the commands' names in `parser`
    "init": init,
    "validate": validate,
    "explain": explain_job,
    "top": top,
    "samples": show_samples,
    "reader": read_samples,
    "eval": evaluations,
    "cost": cost,
    "suspend": suspend,
    "resume": resume,
    "retry": retry,
    "fault": fault,
    "rollout-only": rollout_only,
    "train-only": train_only,
    "timeline": show_timeline,
    "bundle": make_bundle,
    "completion": print_script,
}
