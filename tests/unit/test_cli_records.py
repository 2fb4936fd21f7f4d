"""`timeline`, its trace and page, from records of a real run; and what `bundle` takes out of what it packs."""

from __future__ import annotations

import io
import json
import tarfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from colocated_rl_cli.base.errors import NotAllowed
from colocated_rl_cli.draw import timeline
from colocated_rl_cli.draw.figures import PodHolder, read_figures
from colocated_rl_cli.draw.trace import HOLDER, RUNGS, trace
from colocated_rl_cli.evidence.records import Records
from colocated_rl_cli.support.bundle import Bundle
from colocated_rl_cli.support.scrubbing import REMOVED, scrub, scrub_text

RECORDED = Path(__file__).parent / "records/run.json"


@pytest.fixture(scope="module")
def run() -> Records:
    return Records.read(RECORDED)


# ------------------------------------------------------------------------------------------------------------- timeline
def test_the_timeline_has_a_bar_for_each_pod_and_a_row_for_each_of_the_newest_steps(run: Records) -> None:
    lines = timeline.text(run, width=90, steps=5).splitlines()
    pods = read_figures(run.lines).pods
    bars = {line.split()[0]: line for line in lines if line.split() and line.split()[0] in pods}
    assert pods == sorted(bars)
    assert all(len(bar) <= 90 and {"r", "."} <= set(bar.split()[1]) <= set("rsT.") for bar in bars.values())
    steps = [line.split()[0] for line in lines if line.strip() and line.split()[0].isdigit()]
    assert ["26", "27", "28", "29", "30"] == steps


def test_a_bar_is_the_holder_of_most_of_each_cells_time() -> None:
    rises = [
        ("Trained", 0.0),
        ("Serving", 10.0),
        ("Closed", 19.0),
        ("Released", 20.0),
        ("Trained", 30.0),
        ("Offloaded", 32.0),
        ("Serving", 40.0),
    ]
    lines = [
        {"ts": at, "event": "rung reached", "role": "gpu", "pod": "a", "rung": rung, "step": step, "epoch": step + 1}
        for step, (rung, at) in zip([0, 0, 1, 1, 1, 1, 1], rises, strict=True)
    ]
    text = timeline.text(Records(job={"status": {"epoch": 2, "cause": "NextStep"}}, lines=lines), width=11)
    assert "a  ...rrTTTss" == next(line for line in text.splitlines() if line.startswith("a "))
    assert "NextStep" in text


def test_nothing_known_is_said_and_not_drawn() -> None:
    assert "nothing is known" in timeline.text(Records(job={}, lines=[]))


def test_the_page_needs_nothing_from_elsewhere_and_is_always_the_same(run: Records) -> None:
    page = timeline.render(run)
    assert page == timeline.render(Records.read(RECORDED))
    assert not any(word in page for word in ("http:", "https:", "url(", "@import", "src=", "<script"))
    assert all(pod in page for pod in read_figures(run.lines).pods)


def test_the_trace_says_of_each_pod_who_had_its_gpu_and_why(run: Records) -> None:
    lines = [*run.lines, {"ts": 1.0, "event": "epoch raised", "epoch": 5, "reason": "TrainerDied", "step": 4}]
    made = trace(Records(job=run.job, lines=lines))
    events = made["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    figures = read_figures(run.lines)
    assert {"job arithmetic", *figures.pods} == set(names.values())
    for number, pod in names.items():
        held = [event for event in events if event["ph"] == "X" and (event["pid"], event["tid"]) == (number, HOLDER)]
        spans = [span for span in figures.spans if span.pod == pod]
        assert all(before["ts"] + before["dur"] == after["ts"] for before, after in pairwise(held))
        assert all(before["name"] != after["name"] for before, after in pairwise(held))
        trained = sum(event["dur"] for event in held if event["name"] == PodHolder.TRAINER.value)
        assert trained == pytest.approx(
            1e6 * sum(s.end - s.start for s in spans if s.holder is PodHolder.TRAINER), abs=200
        )
    whys = {event["args"]["epoch"]: event["args"]["why"] for event in events if event.get("args", {}).get("why")}
    assert ("TrainerDied", run.job["status"]["cause"]) == (
        whys[5],
        whys.get(run.job["status"]["epoch"], "AllStepsDone"),
    )
    rungs = [event for event in events if event["ph"] == "X" and event["tid"] == RUNGS]
    assert len(rungs) == len(figures.spans)
    assert json.loads(json.dumps(made)) == made


def test_events_of_the_cluster_are_instants_of_the_trace(run: Records) -> None:
    event = {
        "reason": "TrainerDied",
        "message": "all start again",
        "lastTimestamp": "2026-01-01T00:00:01Z",
    }
    made = trace(Records(job=run.job, lines=run.lines, events=[event, {"reason": "NoTime"}]))["traceEvents"]
    [instant] = [one for one in made if one["name"] == "TrainerDied"]
    assert (1767225601000000, "all start again") == (instant["ts"], instant["args"]["message"])
    assert not [one for one in made if one["name"] == "NoTime"]


# -------------------------------------------------------------------------------------------------------------- secrets
PEM = "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBg\nkqhkiG9w0BAQEF\n-----END PRIVATE KEY-----"
JWT = "eyJhbGciOiJSUzI1NiIs.eyJpc3MiOiJrdWJlcm5l.c2lnbmF0dXJl"
TOKEN = "hf_abcdefghijklmnopqrstuv"


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        (f"key:\n{PEM}\nend", "MIIEvQIBADANBg"),
        (PEM[:50], "MIIEvQ"),
        (f"Authorization: Bearer {JWT}", "eyJ"),
        (f"using {TOKEN} to download", "hf_abc"),
        ("WANDB_API_KEY=0123456789abcdef", "0123456789abcdef"),
        ('{"password": "hunter2 and more"}', "hunter2"),
        ("s3://bucket?x-access-key: AKIAABCDEFGHIJKLMNOP", "AKIAABCD"),
        ("pulling from https://user:pa55w0rd@registry.example.com/x", "pa55w0rd"),
        ("curl -H 'authorization: basic dXNlcjpwYXNz'", "dXNlcjpwYXNz"),
        ("github_pat_11ABCDEFG0123456789abc", "11ABCDEFG"),
        (r'{"event": "config {\"api_key\": \"hunter2 and more\"}"}', "hunter2"),
        ("store redis://:pa55w0rd@cache:6379", "pa55w0rd"),
        ("started as: judge --api-key hunter2 --port 80", "hunter2"),
        ("private_key: hunter2", "hunter2"),
        ("passphrase = hunter2", "hunter2"),
    ],
)
def test_what_looks_like_a_secret_is_taken_out_of_texts(text: str, secret: str) -> None:
    assert secret in text
    assert secret not in scrub_text(text)
    assert REMOVED in scrub_text(text)


@pytest.mark.parametrize(
    "text",
    [
        '{"event":"batch sealed","loss_tokens":1979,"step":1}',
        "1979 tokens, mean reward 0.172",
        "tokens: 12",
        "job default/sums: step 3 of 30",
        "https://registry.example.com/rl/gpu:1.0",
        "max_tokens=48",
        "sglang --max-total-tokens 32768 --tokenizer-path /model",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert text == scrub_text(text)


def test_a_long_word_costs_no_more_than_its_length() -> None:
    """A line of base64 took the square of it: minutes, for a hundred kilobytes."""
    word = "a1-" * 200_000
    assert word == scrub_text(word)


def test_secrets_are_taken_out_of_objects() -> None:
    pod: dict[str, Any] = {
        "metadata": {
            "name": "sums-gpu-0-0",
            "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "{}", "team": "rl"},
            "managedFields": [{}],
        },
        "spec": {
            "containers": [
                {
                    "env": [
                        {"name": "COLOCATE_REPLICA", "value": "0"},
                        {"name": "MY_SETTING", "value": "who knows"},
                        {"name": "WANDB_API_KEY", "value": "abc"},
                        {"name": "FROM", "valueFrom": {"secretKeyRef": {"name": "wandb", "key": "token"}}},
                    ],
                    "args": ["--api-key", "abc", "--port=1", "--hf-token=abc", "--max-total-tokens", "32768"],
                }
            ],
            "volumes": [{"name": "tls", "secret": {"secretName": "sums-tls"}}],
        },
        "config": {
            "learningRate": 1e-6,
            "wandbToken": "abc",
            "maxResponseTokens": 48,
            "nested": [{"passwords": ["abc"]}],
        },
    }
    kept = scrub(pod)
    assert "abc" not in json.dumps(kept).replace(REMOVED, "")
    assert {"team": "rl"} == kept["metadata"]["annotations"]
    assert "managedFields" not in kept["metadata"]
    [container] = kept["spec"]["containers"]
    assert ["0", REMOVED, REMOVED] == [one["value"] for one in container["env"][:3]]
    assert ["--api-key", REMOVED, "--port=1", f"--hf-token={REMOVED}", "--max-total-tokens", "32768"] == container[
        "args"
    ]
    assert "sums-tls" == kept["spec"]["volumes"][0]["secret"]["secretName"]
    assert (1e-6, 48) == (kept["config"]["learningRate"], kept["config"]["maxResponseTokens"])


def test_a_job_without_secrets_stays_as_it_is(run: Records) -> None:
    job = {key: value for key, value in run.job.items() if key != "metadata"}
    assert job == scrub(job)


async def test_an_archive_holds_what_was_read_and_why_the_rest_was_not(tmp_path: Path) -> None:
    async def refused() -> str:
        raise NotAllowed("no right to pods/log")

    async def log() -> str:
        return "password: hunter2"

    made = Bundle("sums-bundle")
    made.document("job.yaml", {"kind": "ColocatedRLJob"})
    await made.read("pods/a/agent.log", log)
    await made.read("pods/b/agent.log", refused)
    path = tmp_path / "bundle.tar.gz"
    made.write(str(path))
    assert 0o600 == path.stat().st_mode & 0o777
    with tarfile.open(path) as archive:
        texts = {one.name: (archive.extractfile(one) or io.BytesIO()).read().decode() for one in archive.getmembers()}
    assert {
        "sums-bundle/job.yaml": "kind: ColocatedRLJob\n",
        "sums-bundle/pods/a/agent.log": f"password: {REMOVED}",
        "sums-bundle/not-read.txt": "pods/b/agent.log: no right to pods/log\n",
    } == texts
    with pytest.raises(FileExistsError):
        made.write(str(path))
