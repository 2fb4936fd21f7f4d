"""`timeline`, its trace and page, from records of a real run; and what `bundle` takes out of what it packs."""

from __future__ import annotations

import io
import json
import random
import string
import tarfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from colocated_rl_api.holders import PodHolder
from colocated_rl_cli.base.errors import NotAllowed
from colocated_rl_cli.draw import timeline
from colocated_rl_cli.draw.figures import read_figures
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
    assert "2026-11-21 13:47:30 to 2026-11-21 13:52:35 UTC, 5 min 5 s" == lines[0]
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


def test_nothing_known_is_reported_and_not_drawn() -> None:
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
        ("serve --wandb-key 0123456789abcdef0123456789abcdef01234567 --port 80", "0123456789abcdef"),
        ("GET https://maps.example.com/v1?key=sEcr3t&x=1", "sEcr3t"),
        ("GET /v1?x=1&key=sEcr3t", "sEcr3t"),
        ("Cookie: session=s3ss10n; theme=dark", "s3ss10n"),
        ('{"headers": {"Set-Cookie": "id=s3ss10n; HttpOnly"}}', "s3ss10n"),
        ('{"event": "sent {\\"Cookie\\": \\"id=s3ss10n; x=y\\"}"}', "s3ss10n"),
        ("https://acct.blob.core.windows.net/c/b?sv=2022-11-02&se=2026-01-01&sr=b&sig=aB3dE%2FfGh%3D", "aB3dE"),
        (
            "https://b.s3.amazonaws.com/o?X-Amz-Credential=AKIAIOSF%2F2026&X-Amz-Signature=fe5f80f77d5fa3beca038a248ff027d0",
            "fe5f80f77d5f",
        ),
        ("https://b.s3.amazonaws.com/o?X-Amz-Security-Token=IQoJb3JpZ2lu&X-Amz-Date=1", "IQoJb3JpZ2lu"),
        ("https://storage.googleapis.com/b/o?X-Goog-Signature=247a2aa45f169edf4d187d54e7cc", "247a2aa45f"),
        ("DefaultEndpointsProtocol=https;AccountName=a;AccountKey=Zm9vYmFy;EndpointSuffix=x", "Zm9vYmFy"),
        ("alert to https://hooks.slack.com/services/T00000000/B00000000/abcdefgh", "abcdefgh"),
        ("https://discord.com/api/webhooks/123456789/tok-en_x", "tok-en_x"),
        ("https://discordapp.com/api/webhooks/123456789/tok-en_x", "tok-en_x"),
        ("https://acme.webhook.office.com/webhookb2/aaaa-bbbb/IncomingWebhook/cccc", "cccc"),
        ("https://api.telegram.org/bot110201543:AAHdqTcvCH1vGWJxfSeofSAs0K5PALDsaw/sendMessage", "AAHdqTcv"),
        ("https://chat.googleapis.com/v1/spaces/AAA/messages?key=k&token=t0k3n", "t0k3n"),
        ("https://chat.example.com/hooks/xq3b8r", "xq3b8r"),
        ("password: 12345678", "12345678"),
        ("PGPASSWORD=20260101 psql", "20260101"),
        ("--db-password 12345678", "12345678"),
        ("passwd=0000", "0000"),
        ("db:\n  password: |\n    hunter2\n    more\nport: 80\n", "hunter2"),
        ("db:\n  password: |\n    hunter2\n    more\nport: 80\n", "more"),
        ("  - api_key: >-\n      hunter2\n", "hunter2"),
        ('{"event": "config password: |\\\\n  hunter2\\\\n", "step": 1}', "hunter2"),
        ("Authorization: AWS4-HMAC-SHA256 Credential=AKID/2026, Signature=fe5f80f7", "fe5f80f7"),
        ("authorization: Token 9944b09199c62bcf", "9944b09"),
        ("Proxy-Authorization: Digest username=u, response=6629fae49393", "6629fae"),
        ("x-api-key: hunter2", "hunter2"),
        ("secret is wJalrXUtnFEMI7K7MDENGbPxRfiCYzX93aQ1", "wJalr"),
        ("using q8Zr2LmX9vTn4KpW7sYb3HdF here", "q8Zr2L"),
        ("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", "TwL2i"),
        ("hvs.CAESIJabcdefghijklmnop", "CAESI"),
        ("signing_key: hunter2", "hunter2"),
        ("dckr_pat_abcdefghijklmnopqrst", "abcdefghijk"),
        ("nvapi-abcdefghijklmnopqrstuv", "abcdefghijk"),
        ("redis://default:12345678@cache:6379", "12345678"),
        ("Server=db;Uid=u;Pwd=hunter2;", "hunter2"),
        ('{"pwd": "hunter2"}', "hunter2"),
        ("DB_PASS=hunter2", "hunter2"),
        ("mail_pass: hunter2", "hunter2"),
        ("passcode: 1234", "1234"),
        ('{"auths": {"registry.example": {"auth": "dXNlcjpwYXNz"}}}', "dXNlcjpwYXNz"),
        ("machine api.wandb.ai login user password hunter2", "hunter2"),
        ("curl -u admin:hunter2 https://x", "hunter2"),
        ("curl --user=admin:hunter2 https://x", "hunter2"),
        ("postgres://u:pa/ss@db/x", "pa/ss"),
        ("https://user:p@ss@db/x", "ss@"),
        ('passwd="a b\\"c hunter2"', "hunter2"),
        ("{'password': b'hunter2'}", "hunter2"),
        ('password = """hunter2"""', "hunter2"),
        ("password => hunter2", "hunter2"),
        ("password -> hunter2", "hunter2"),
        ("secret: !!binary |\n  aHVudGVyMg==\n", "aHVudGVyMg"),
        ("GOCSPX-abcdefghijklmnopqrst", "abcdefghij"),
        ("AGE-SECRET-KEY-1QQQQQQQQQQ", "1QQQQ"),
        ("aws_secret_access_key\twJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "wJalr"),
        ("the password is hunter2", "hunter2"),
        ("passwords:\n  - hunter2\n  - more\n", "more"),
        ('{"tokens": ["hunter2abc"]}', "hunter2abc"),
        ("redirect=https%3A%2F%2Fuser%3Apa55w0rd%40host%2F", "pa55w0rd"),
        ("mysql -phunter2 -u root", "hunter2"),
        ("docker login -p hunter2", "hunter2"),
        ("local-0123456789abcdef0123456789abcdef01234567", "0123456789abcdef"),
        ('{"cookies":[{"name":"sid","value":"hunter2"}]}', "hunter2"),
        ("('set-cookie', 'sid=hunter2')", "hunter2"),
        ("('Authorization', 'Bearer abc')", "abc"),
        ("{b'Authorization': b'Bearer abc'}", "abc"),
        ('<input name="password" value="hunter2">', "hunter2"),
        ("<password>hunter2</password>", "hunter2"),
        ("- name: DB_PASSWORD\n  value: hunter2\n", "hunter2"),
        ('{"name":"DB_PASSWORD","value":"hunter2"}', "hunter2"),
        ('["--api-key", "hunter2"]', "hunter2"),
        ("['prog', '--api-key', 'hunter2']", "hunter2"),
        ("otp=123456", "123456"),
        ("pw=hunter2", "hunter2"),
        ("creds: user:hunter2", "hunter2"),
        ("\x1b[1mpassword\x1b[0m: hunter2", "hunter2"),
        ('{"log":"\\u001b[1mpassword\\u001b[0m: hunter2"}', "hunter2"),
        ("https://ghtokenabcdef@github.com/x", "ghtokenabcdef"),
        ("client-key-data: LS0tLS1CRUdJTg==", "LS0tLS"),
        ("https:\\/\\/hooks.slack.com\\/services\\/T0\\/B0\\/abcdefgh", "abcdefgh"),
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
        "token: 12",
        "image docker.io/library/gpu@sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        "uid 3f2504e0-4f89-41d3-9a0c-0305e82c3301",
        "commit 2af843593f2c1b0a4e7d8c9b6a5f4e3d2c1b0a9f",
        "SHA256:uNiVztksCsDhcc0u9e8BgrJXVGDTbd4pXJ1W3Q2yZ5E fingerprint",
        "sha512-z4PhNX7vuL3xVChQ1m2AB9Yg5AULVxXcg/SpIdNs6c5H0NE8XYXysP+DGNKHfuwvY7kxvUdBeoGlODJ6+SfaPg==",
        "Qwen25VLForConditionalGeneration",
        "DeepSeek-R1-Distill-Qwen-32B",
        "Qwen3-Coder-480B-A35B-Instruct-FP8",
        "DeepSeekV3ForCausalLMNextN",
        "pod sums-gpu-0-0-7d4b9c6f5d-x2x9q",
        "/checkpoints/step-00012-lineage-3/rank-00000-of-00008.safetensors",
        "NCCL_ASYNC_ERROR_HANDLING=1 TORCH_NCCL_ENABLE_MONITORING=0",
        "2026-11-24T07:51:43.123456Z",
        "author: somebody",
        "key: nvidia.com/gpu",
        "GET /v1/samples?limit=20&state=sealed",
        "secret: null",
        "password: None",
        '{"data_pass":2,"step":1}',
        "python -u -m judge --port 80",
        "registry.example.com:5000/rl/gpu@sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        "3 of 4 tests pass",
        "authority: operator",
        "the sidecar's webhook is called",
        "pin: true",
        "a password is needed: set spec.model",
        "secret sums-tls is not there",
        "names: [agent, rollout]",
        "ssh://git@example.com/x",
        '{"name":"sums-gpu-0-0","value":3}',
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert text == scrub_text(text)


def test_a_long_word_costs_no_more_than_its_length() -> None:
    """A line of base64 took the square of it: minutes, for a hundred kilobytes."""
    word = "a1-" * 100_000
    assert word == scrub_text(word)
    for words in ("password: |\n", "https://a/", "https://a:", "://", "?key", "cookie", "--", "a-", "-key", "\\", " "):
        assert scrub_text(words * 40_000)


def test_words_that_chance_has_drawn_are_taken_out_wherever_they_stand() -> None:
    """The last net: these have no name and no form that is known."""
    drawn, letters = random.Random(1), string.ascii_letters + string.digits
    words = ["".join(drawn.choices(letters, k=40)) for _ in range(200)]
    kept = [word for word in words if word in scrub_text(f"started with {word} for it")]
    assert 10 > len(kept)


def test_a_figure_under_the_name_of_a_secret_is_one() -> None:
    """It was taken for a count."""
    kept = scrub({"password": 12345678, "maxTokens": 48, "token": 3, "wandbKey": "abc", "topologyKey": "zone"})
    assert {"password": REMOVED, "maxTokens": 48, "token": 3, "wandbKey": REMOVED, "topologyKey": "zone"} == kept
    assert ["--wandb-key", REMOVED] == scrub(["--wandb-key", "abc"])
    assert ["curl", "-u", f"me:{REMOVED}"] == scrub(["curl", "-u", "me:abc"])
    assert ["python", "-u", "judge.py", "--user", "65532"] == scrub(["python", "-u", "judge.py", "--user", "65532"])
    assert {"DB_PASS": REMOVED, "pwd": REMOVED, "data_pass": 2} == scrub(
        {"DB_PASS": "abc", "pwd": "abc", "data_pass": 2}
    )


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
