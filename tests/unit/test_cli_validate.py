"""`validate`: the API server's verdict without one, with the place of each fault; and manifests that `init` writes."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml
from documents.blocks import blocks, under
from hypothesis import example, given, settings
from hypothesis import strategies as st

import quick_yaml
from builders import ROLLOUT, make_manifest
from colocated_rl_api.job import ColocatedRLJob
from colocated_rl_api.model import HubModel, ModelClaim
from colocated_rl_cli.__main__ import run
from colocated_rl_cli.base.errors import UsageError
from colocated_rl_cli.base.yaml_text import (
    Position,
    Unreadable,
    plain,
    read,
    written,
)
from colocated_rl_cli.manifest.manifest import judge
from colocated_rl_cli.manifest.starter import Wishes, manifest
from scenarios.corpus import BAD, EXAMPLES, GOOD, Case, cases
from setup.layout import CHECKOUT

JOB = """\
apiVersion: rl.colocate.dev/v1alpha1
kind: ColocatedRLJob
metadata: {name: sums}
spec:
  steps: 3
  model: {claim: {name: model}}
  rollout:
    prompts: {reasoningGym: {name: chain_sum}}
    batchSize: 8
    groupSize: 4
"""


def faults(text: str) -> list[tuple[int, str, str]]:
    return [(fault.place.line, fault.field, fault.message) for fault in judge(text).faults]


# ---------------------------------------------------------------------------------------------------- the same verdict
@cases(*EXAMPLES, *GOOD.values())
def test_a_manifest_that_the_server_accepts_is_accepted(case: Case) -> None:
    verdict = judge(case.text)
    assert () == verdict.faults
    assert verdict.is_accepted


@cases(*BAD.values())
def test_a_manifest_that_the_server_refuses_is_refused_at_the_field_that_it_names(case: Case) -> None:
    verdict = judge(case.text)
    assert not verdict.is_accepted
    [fault] = verdict.faults
    named, found = (field.replace("[", ".").replace("]", "").split(".") for field in (case.field, fault.field))
    assert named[: len(found)] == found
    line = case.text.splitlines()[fault.place.line - 1]
    deepest = next(part for part in reversed(found) if not part.isdigit())
    is_there = f"{deepest}:" in case.text  # a field that is missing is told where it should be
    assert (not is_there) or deepest in line or line.lstrip().startswith(("- ", "? "))


def test_every_fault_is_reported_at_once_in_the_order_of_the_file() -> None:
    text = JOB.replace("steps: 3", "steps: 0").replace("groupSize: 4", "groupSize: four")
    assert [(5, "spec.steps"), (10, "spec.rollout.groupSize")] == [fault[:2] for fault in faults(text)]


def test_a_typo_is_reported_with_the_name_that_was_meant() -> None:
    assert [(9, "spec.rollout.batchsize", "unknown field: did you mean batchSize?")] == faults(
        JOB.replace("    batchSize: 8\n", "    batchsize: 8\n    batchSize: 8\n")
    )


@pytest.mark.parametrize(
    ("written", "instead", "words"),
    [
        (
            "model: {claim: {name: model}}",
            "model: my-model",
            "should be an object with fields claim, image, huggingFace, not 'my-model'",
        ),
        ("steps: 3", 'steps: "3"', "should be a whole number, not '3': write it without quotes"),
        ("steps: 3", "steps: three", "should be a whole number, not 'three'"),
        ("steps: 3", "steps: 3\n  suspend: 1", "should be true or false, not 1"),
        ("batchSize: 8", "batchSize: 8\n    engine: {args: --tp-size=8}", "should be a list, not '--tp-size=8'"),
        ("{name: chain_sum}", "chain_sum", "not 'chain_sum'"),
        ("name: sums", "name: My_Sums", "My_Sums must be at most 40 of"),
    ],
)
def test_what_a_field_should_be_is_explained_in_words_of_manifests(written: str, instead: str, words: str) -> None:
    """It does not say `a valid dictionary or instance of Model`."""
    [(_, _, message)] = faults(JOB.replace(written, instead))
    assert words in message
    assert "metadata.name" not in message, "the field stands before it"


def test_a_rule_over_several_fields_is_reported_at_the_one_that_it_is_about() -> None:
    [(line, field, message)] = faults(JOB + "    maxConcurrency: 100\n")
    assert (11, "spec.rollout.maxConcurrency") == (line, field)
    assert "maxConcurrency is 100" in message


def test_a_key_that_comes_twice_is_refused_as_by_the_server() -> None:
    assert [(6, "", 'key "steps" already set in map')] == faults(JOB.replace("steps: 3", "steps: 3\n  steps: 4"))


def test_text_that_is_no_yaml_is_refused_where_it_breaks() -> None:
    [(line, _, message)] = faults(JOB.replace("metadata: {name: sums}", "metadata: {name: sums"))
    assert 4 == line
    assert "expected ',' or '}'" in message


@pytest.mark.parametrize(
    ("metadata", "field"),
    [
        ("{name: sums, labels: {a: 1}}", "metadata.labels.a"),
        ("{name: sums, annotations: [a]}", "metadata.annotations"),
        ("{name: sums, lables: {a: b}}", "metadata.lables"),
        ("{name: sums, namespace: 7}", "metadata.namespace"),
        ("{name: sums, namespace: Team_A}", "metadata.namespace"),
        ("{name: sums, labels: {team/of/rl: a}}", "metadata.labels"),
        ("{name: sums, labels: {Team.example/a: b}}", "metadata.labels"),
        ("{name: sums, labels: {team: reinforcement learning}}", "metadata.labels.team"),
        (f"{{name: sums, labels: {{team: {'a' * 64}}}}}", "metadata.labels.team"),
        ("{name: sums, annotations: {a b: c}}", "metadata.annotations"),
        (f"{{name: sums, annotations: {{a: {'b' * 2**18}}}}}", "metadata.annotations"),
        ("{generateName: Sums-}", "metadata.name"),
    ],
)
def test_metadata_is_judged_too(metadata: str, field: str) -> None:
    assert [(3, field)] == [fault[:2] for fault in faults(JOB.replace("{name: sums}", metadata))]


@pytest.mark.parametrize(
    "metadata",
    [
        "{name: sums, namespace: '', labels: {app.kubernetes.io/name: a, b: ''}, annotations: {Team.example/a: 'b c'}}",
        "{generateName: sums-}",
    ],
)
def test_metadata_that_the_server_takes_is_fine(metadata: str) -> None:
    assert judge(JOB.replace("{name: sums}", metadata)).is_accepted


@pytest.mark.parametrize(
    "head", ["apiVersion: v1\nkind: List", "apiVersion: rl.colocate.dev/v1alpha1\nkind: ColocatedRLJobList"]
)
def test_jobs_of_a_list_are_judged_each_where_it_stands(head: str) -> None:
    item = f"- {textwrap.indent(JOB, '  ').strip()}\n"
    listed = f"{head}\nitems:\n{item}- {{apiVersion: v1, kind: ConfigMap}}\n"
    verdict = judge(listed + item)
    assert (("sums", "sums"), 1, ()) == (verdict.jobs, verdict.others, verdict.faults)
    assert [(3 + 10 + 1 + 5, "spec.steps")] == [
        fault[:2] for fault in faults(listed + item.replace("steps: 3", "steps: 0"))
    ]
    assert not judge(f"{head}\nitems: []\n").is_accepted


def test_other_objects_of_a_file_are_passed_over() -> None:
    verdict = judge("apiVersion: v1\nkind: ConfigMap\n---\n# nothing\n---\n" + JOB)
    assert (("sums",), 1, True) == (verdict.jobs, verdict.others, verdict.is_accepted)


@pytest.mark.parametrize("text", ["", "# nothing\n", "apiVersion: v1\nkind: ConfigMap\n", "- a\n", "just words\n"])
def test_a_file_without_a_job_is_refused(text: str) -> None:
    assert not judge(text).is_accepted


def test_a_job_with_a_typo_in_its_kind_is_judged_as_one() -> None:
    assert [(2, "kind")] == [fault[:2] for fault in faults(JOB.replace("ColocatedRLJob", "ColocatedRlJob"))]


# ------------------------------------------------------------------------------------------------------ the YAML of Go
@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1.0e+3", 1000.0),
        ("5e3", 5000.0),
        (".5", 0.5),
        ("1_000", 1000),
        ("0x1F", 31),
        ("0b101", 5),
        ("0o17", 15),
        ("017", 15),
        ("089", 89.0),
        ("-7", -7),
        ("+7", 7),
        ("1:30", "1:30"),
        ("2026-01-02", "2026-01-02"),
        ("yes", True),
        ("Off", False),
        ("~", None),
        ("null", None),
        ("1.2.3", "1.2.3"),
        ("-", "-"),
        ("--port", "--port"),
        ("1Gi", "1Gi"),
    ],
)
def test_plain_scalars_are_what_the_server_takes_them_for(text: str, value: object) -> None:
    assert value == plain(text)
    assert type(value) is type(plain(text))


def test_anchors_aliases_and_merges_are_written_out() -> None:
    [document] = read("a: &x {b: 1, c: 2}\nd: {<<: *x, c: 3}\ne: *x\n")
    assert {"a": {"b": 1, "c": 2}, "d": {"b": 1, "c": 3}, "e": {"b": 1, "c": 2}} == document.value
    assert Position(2, 13) == document.places[("d", "c")]


def test_aliases_that_grow_without_end_are_refused() -> None:
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)
    )
    with pytest.raises(Unreadable, match="too large"):
        list(read(bomb))
    with pytest.raises(Unreadable, match="too large or too deep"):
        list(read("&a [*a]"))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a:\t1\n", {"a": 1}),
        ("a: 1\t# said\nb:\t[x,\tz]\t\n", {"a": 1, "b": ["x", "z"]}),
        ("a: b\t c \t\n  d\n", {"a": "b\t c d"}),
        ("a: b\t\n---\n", {"a": "b"}),
    ],
)
def test_a_tab_between_words_is_a_space(text: str, value: object) -> None:
    assert [value] == [document.value for document in read(text)]


@pytest.mark.parametrize("text", ["a:\n\tb: 1\n", "a:\n  - \tb: 1\n", "\ta: 1\n"])
def test_a_tab_that_indents_is_refused(text: str) -> None:
    with pytest.raises(Unreadable, match="a tab where YAML wants spaces"):
        list(read(text))


@pytest.mark.parametrize("text", ["? [a]\n: 1\n", "null: 1\n", "~: 1\n", "? \n"])
def test_a_key_that_is_no_text_is_refused(text: str) -> None:
    with pytest.raises(Unreadable, match="a key should be a text"):
        list(read(text))


def test_lines_may_end_as_on_windows() -> None:
    assert [(5, "spec.steps")] == [
        fault[:2] for fault in faults(JOB.replace("steps: 3", "steps: 0").replace("\n", "\r\n"))
    ]


@pytest.mark.parametrize("text", ["[" * 1_000, "a: " + "{a: " * 20_000, "- " * 20_000])
def test_what_is_nested_without_end_is_refused(text: str) -> None:
    with pytest.raises(Unreadable, match="too deep"):
        list(read(text))


@settings(max_examples=25)
@given(text=st.text() | st.from_regex(r"[-+.0-9exob_:yYnNfF]{1,8}", fullmatch=True))
@example(text="12e45678")
@example(text="0o17")
@example(text="y")
@example(text="089")
@example(text="1e3")
def test_a_text_that_is_written_is_the_same_text_to_the_server(text: str) -> None:
    [document] = read(written({text: [text]}))
    assert {text: [text]} == document.value


# ---------------------------------------------------------------------------------------------------------------- init
def test_a_new_manifest_is_accepted_and_says_what_each_field_means() -> None:
    text = manifest(Wishes(name="sums", model="models:qwen/small", task="chain_sum", steps=7, replicas=2, gpus=8))
    verdict = judge(text)
    assert (("sums",), True) == (verdict.jobs, verdict.is_accepted)
    job = ColocatedRLJob.read(quick_yaml.load(text))
    assert (7, 2, 8) == (job.spec.steps, job.spec.replicas, job.spec.gpus.count)
    assert ModelClaim(name="models", path="qwen/small") == job.spec.model.claim
    assert "  # Training steps; the job is complete after the last. May change.\n  steps: 7\n" in text


def test_a_new_manifest_may_name_a_model_of_the_hub() -> None:
    text = manifest(Wishes(name="sums", model=f"us/small@{'a' * 40}", task="chain_sum"))
    assert HubModel(name="us/small", revision="a" * 40) == ColocatedRLJob.read(quick_yaml.load(text)).spec.model.source
    with pytest.raises(UsageError, match="should be a commit, 40 hexadecimal digits"):
        manifest(Wishes(name="sums", model="us/small@main", task="chain_sum"))


def test_the_first_job_for_a_gpu_is_written_and_judged_as_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    written, judged, applied, _ = under("docs/gpus.md", "A first job on one GPU")
    for command in (written, judged):
        program, plugin, *words = command.split()
        assert ("kubectl", "crlj", 0) == (program, plugin, run(words, {}))
    assert "sums.yaml: fine: sums" in capsys.readouterr().out
    spec = ColocatedRLJob.read(quick_yaml.load((tmp_path / applied.split()[-1]).read_text())).spec
    assert ("Qwen/Qwen3-0.6B", 1) == (spec.model.path.rpartition("/")[0], spec.gpus.count)


ONE_GPU = "docs/first-gpu-job.md"
DOCKERS = {"--gpus", "--volume", "--env", "--publish", "--shm-size", "--ipc", "--restart", "--detach"}
HAS_A_FIELD = {
    "--model-path",
    "--port",
    "--host",
    "--api-key",
    "--dp",
    "--dp-size",
    "--nnodes",
    "--node-rank",
    "--dist-init-addr",
}  # of a job


def test_the_job_of_the_page_for_one_gpu_is_judged_as_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    judged, applied = under(ONE_GPU, "The job")
    program, plugin, *words = judged.split()
    file = applied.split()[-1]
    assert ("kubectl", "crlj", ["validate", file]) == (program, plugin, words)
    assert 0 == run(["validate", str(CHECKOUT.root / file)], {})
    assert "fine: first" in capsys.readouterr().out
    [shown] = [block.text for block in blocks(ONE_GPU) if block.language == "yaml"]
    assert (CHECKOUT.root / file).read_text().partition("\n")[2] == shown


def flags_of_the_page() -> dict[str, str]:
    """Return what becomes of each flag, by the page's table."""
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", (CHECKOUT.root / ONE_GPU).read_text(), re.MULTILINE)
    return {flag: becomes for flags, becomes in rows for flag in re.findall(r"`(-[^`]*)`", flags)}


def test_every_flag_of_the_command_that_the_page_for_one_gpu_begins_with_is_in_its_table() -> None:
    [command] = [block.text for block in blocks(ONE_GPU) if block.text.startswith("docker run")]
    flags = {word.partition("=")[0] for word in command.split() if word.startswith("-")}
    assert flags <= {flag.split()[0] for flag in flags_of_the_page()} | {"-m"}  # which is Python's


def test_flags_that_the_page_for_one_gpu_says_are_refused_are_and_others_not() -> None:
    for flag, becomes in flags_of_the_page().items():
        if not flag.startswith("--") or flag.split()[0] in DOCKERS:
            continue
        args = flag.split() if " " in flag else [flag, "1"]
        verdict = judge(written(make_manifest(rollout=ROLLOUT | {"engine": {"args": args}})))
        assert verdict.is_accepted != ("`validate` refuses" in becomes or flag in HAS_A_FIELD), flag


def test_a_job_without_gpus_has_the_engines_flags_for_a_cpu() -> None:
    """Its engine looked for a GPU, and ended. These are the demo's, of which it has more to be small."""
    written = quick_yaml.load(manifest(Wishes(name="sums", model="m", task="chain_sum", gpus=0)))
    demo = quick_yaml.load((CHECKOUT.root / "examples/arithmetic/job.yaml").read_text())
    flags = written["spec"]["rollout"]["engine"]["args"]
    assert "--device=cpu" in flags
    assert set(flags) <= set(demo["spec"]["rollout"]["engine"]["args"])
    assert "engine" not in quick_yaml.load(manifest(Wishes(name="s", model="m", task="chain_sum")))["spec"]["rollout"]


def test_prompts_of_ones_own_are_a_file_and_a_reward() -> None:
    wishes = Wishes(name="own", model="m", prompts="data:math/train.jsonl", reward="rewards:score")
    source = ColocatedRLJob.read(quick_yaml.load(manifest(wishes))).spec.rollout.prompts.file
    assert source
    assert ("data", "math/train.jsonl", "rewards:score") == (source.claim_name, source.path, source.reward.function)


def test_prompts_that_a_function_makes_are_named_with_their_claim() -> None:
    wishes = Wishes(name="own", model="m", prompts="data:making:problem", reward="rewards:score")
    source = ColocatedRLJob.read(quick_yaml.load(manifest(wishes))).spec.rollout.prompts.function
    assert source
    assert ("data", "making:problem", "rewards:score") == (source.claim_name, source.name, source.reward.function)


@pytest.mark.parametrize("what", ["saved", "gsm8k-v1.0", "math/train-*.parquet", "a.arrow"])
def test_what_a_rollout_controller_reads_may_be_prompts(what: str) -> None:
    wishes = Wishes(name="own", model="m", prompts=f"data:{what}", reward="rewards:score")
    assert f"path: {what}\n" in manifest(wishes).replace("'", "")


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        (Wishes(name="a", model="m", prompts="data:sums.csv", reward="a:b"), "ends with one of .jsonl, .parquet"),
        (Wishes(name="a", model="m", prompts="data:sums.jsonl.gz", reward="a:b"), "ends with one of .jsonl, .parquet"),
        (Wishes(name="a", model="m", prompts="data:making:", reward="a:b"), "should be MODULE:FUNCTION"),
        (Wishes(name="a", model="m", prompts="data", reward="a:b"), "path"),
        (Wishes(name="Bad_Name", model="m", task="t"), "metadata.name"),
        (Wishes(name="a", model="m", task="t", steps=0), "spec.steps"),
        (Wishes(name="a", model="m"), "one source"),
        (Wishes(name="a", model="m", task="t", reward="a:b"), "one source"),
    ],
)
def test_wishes_that_make_no_job_are_refused_with_the_reason(wishes: Wishes, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        manifest(wishes)


def test_the_builders_manifest_is_accepted() -> None:
    assert judge(yaml.safe_dump(make_manifest())).is_accepted


@pytest.mark.parametrize(("field", "value"), [("elasticPolicy", {"minReplicas": 1}), ("spares", 1)])
@pytest.mark.parametrize("place", ["the job", "the template of its pods"])
def test_a_job_of_another_number_of_pods_in_a_queue_is_refused(place: str, field: str, value: Any) -> None:
    labels = {"labels": {"kueue.x-k8s.io/queue-name": "research"}}
    queued = make_manifest(**{field: value})
    if place == "the job":
        queued["metadata"] |= labels
    else:
        queued["spec"]["podTemplates"] = {"gpu": {"metadata": labels}}
    [(_, found, message)] = faults(yaml.safe_dump(queued))
    assert f"spec.{field}" == found
    assert "a queue, which admits a group of a fixed number of pods" in message
