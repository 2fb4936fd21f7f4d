"""Every manifest gets one verdict: the API server's and the models' are the same, and so are their defaults.

tests/scenarios/good.yaml and bad.yaml are the corpus; a row of bad.yaml has the field that a refusal names and words of
it. Beyond the corpus, hypothesis changes values around every bound of the schema.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator

import pytest
from contract.api_server import Answer, ApiServer, Document
from hypothesis import event, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

import quick_yaml
from colocated_rl_api import names
from colocated_rl_api.job import ColocatedRLJob, ColocatedRLJobSpec, Rollout
from colocated_rl_cli.base.yaml_text import read
from colocated_rl_cli.manifest.manifest import judge
from colocated_rl_operator.crd import Schema, structural_schema
from scenarios.corpus import BAD, EXAMPLES, GOOD, Case, cases
from setup.layout import CHECKOUT

pytestmark = pytest.mark.cluster

MINIMAL = (CHECKOUT.root / "crds/examples/minimal.yaml").read_text()
JOBS = f"/apis/{names.API_VERSION}/namespaces/default/{names.PLURAL}"
DRY_RUN = "dryRun=All&fieldValidation=Strict"


def explicit(job: ColocatedRLJob) -> Document:
    """Return the fields that the document itself sets, without defaults of the models."""
    return job.spec.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True)


def complete(job: ColocatedRLJob) -> Document:
    return job.spec.model_dump(mode="json", by_alias=True, exclude_none=True)


def read_stored(stored: Document) -> ColocatedRLJob:
    return ColocatedRLJob.read({key: stored[key] for key in ("apiVersion", "kind", "metadata", "spec")})


def dry_run(api: ApiServer, case: Case) -> Answer:
    return api.request("POST", f"{JOBS}?{DRY_RUN}", case.text.encode(), content_type="application/yaml")


@cases(*GOOD.values(), *EXAMPLES)
def test_good_manifest_is_accepted_by_both_with_the_same_defaults(api: ApiServer, case: Case) -> None:
    answer = dry_run(api, case)
    assert answer.is_accepted, answer.message
    read = ColocatedRLJob.read(quick_yaml.load(case.text))
    stored = read_stored(answer.body)
    assert complete(read) == explicit(stored)
    assert read.spec == stored.spec


@cases(*BAD.values())
def test_bad_manifest_is_refused_by_both_with_a_message_that_names_the_field(api: ApiServer, case: Case) -> None:
    answer = dry_run(api, case)
    assert not answer.is_accepted
    assert case.server in answer.message
    # what decoding refuses has no list of fields
    assert case.field in answer.fields or f'unknown field "{case.field}"' in answer.message

    with pytest.raises(ValidationError) as refusal:
        ColocatedRLJob.read(quick_yaml.load(case.text))
    [error] = refusal.value.errors()
    assert case.models in error["msg"]
    path = path_of(error["loc"])
    if error["type"] == "rule":  # one text in CEL for both: the same field and the same words, values and all
        path += parts(error["ctx"]["field"])
        assert parts(case.field) == path
        assert error["msg"] in answer.message
    assert parts(case.field)[: len(path)] == path


def test_flags_of_a_version_of_an_engine_are_not_in_the_schema(api: ApiServer) -> None:
    """They are judged by `kubectl crlj validate` and the operator: see tests/unit/test_engine_flags.py."""
    manifest = quick_yaml.load(MINIMAL)
    args = ["--port", "--quantization=fp8", "--tp-size 8"]
    manifest["spec"]["rollout"]["engine"] = {"args": args}
    answer = api.request("POST", f"{JOBS}?{DRY_RUN}", manifest)
    assert answer.is_accepted, answer.message
    assert answer.body["spec"]["rollout"]["engine"]["args"] == args


def parts(field: str) -> list[str]:
    """The server writes an item and a key of a map in brackets, or the key as a field."""
    return field.replace("[", ".").replace("]", "").split(".")


def path_of(location: tuple[int | str, ...]) -> list[str]:
    """A bad key of a map is the map's fault."""
    return [str(part) for part in (location[:-2] if location[-1] == "[key]" else location)]


# ---------------------------------------------------------------------------------------------- the YAML of the server
SCALARS = (CHECKOUT.root / "tests/scenarios/scalars.txt").read_text().splitlines()


def as_config(scalar: str) -> str:
    config = f"      value: {scalar}\n      list: [{scalar}]\n"
    return MINIMAL + "  trainer:\n    config:\n" + config


def compared(job: Document) -> list[str]:
    """Values with their types; a whole number is one however it is written, and what is null is not stored."""
    config = job["spec"]["trainer"]["config"]
    values = [config.get("value"), *config["list"]]
    return [repr(float(one)) if type(one) in (int, float) else repr(one) for one in values]


def test_the_command_line_reads_scalars_as_the_server_does(api: ApiServer) -> None:
    """Each as a value and in a list; what the server refuses is refused."""
    differences = []
    for scalar in SCALARS:
        text = as_config(scalar)
        answer = api.request("POST", f"{JOBS}?{DRY_RUN}", text.encode(), content_type="application/yaml")
        here = compared(next(iter(read(text))).value) if judge(text).is_accepted else None
        there = compared(answer.body) if answer.is_accepted else None
        if here != there:
            differences.append(f"{scalar}: here {here}, there {there} {answer.message[:200]}")
    assert [] == differences


@cases(*GOOD.values(), *BAD.values(), *EXAMPLES)
def test_the_command_line_gives_the_servers_verdict(api: ApiServer, case: Case) -> None:
    assert dry_run(api, case).is_accepted == judge(case.text).is_accepted


@pytest.mark.parametrize(
    "metadata",
    ["{name: a, labels: {a: 1}}", "{name: a, lables: {}}", "{name: a, annotations: {a: b}}", "{name: a, name: b}",
     "{name: a, annotations: null}", "{name: a, generateName: 7}", "{name: a, labels: {a: null}}"],
)  # fmt: skip
def test_the_command_line_judges_metadata_as_the_server_does(api: ApiServer, metadata: str) -> None:
    text = MINIMAL.replace("\nmetadata:\n  name: minimal", f"\nmetadata: {metadata}")
    assert metadata in text
    answer = api.request("POST", f"{JOBS}?{DRY_RUN}", text.encode(), content_type="application/yaml")
    assert answer.is_accepted == judge(text).is_accepted, answer.message


# ------------------------------------------------------------------------------------------------------ immutability
FULL = quick_yaml.load((CHECKOUT.root / "crds/examples/full.yaml").read_text())
MAY_CHANGE = {
    "steps": 7,
    "suspend": True,
    "backoffLimit": 7,
    "backoffWindowSteps": 7,
    "retries": 7,
    "failurePolicy.backoffSeconds": 7,
    "failurePolicy": None,
    "podsReadyDeadlineSeconds": 7,
    "spares": 7,
    "elasticPolicy": {"minReplicas": 1},
    "activeDeadlineSeconds": 7,
    "ttlSecondsAfterFinished": 7,
    "rollout.maxConcurrency": 7,
    "rollout.sampling.temperature": 0.7,
    "evaluation.sets.0.samples": 7,
    "evaluation.sets.0.sampling.topP": 0.7,
    "evaluation.sets": [{"name": "held-out"}, {"name": "again"}],
    "evaluation": None,
}
MAY_CHANGE_WHILE_SUSPENDED = {
    "replicas": 7,
    "gpus.image": "registry.example.com/rl/gpu:1.1",
    "gpus.resources.limits.memory": "96Gi",
    "rollout.engine.args": ["--mem-fraction-static", "0.7"],
    "rollout.resources.limits.memory": "7Gi",
    "weightSync.sizeLimit": "7Gi",
    "weightSync.verify": "Version",
    "checkpoint.everySteps": 7,
    "checkpoint.keep": 7,
    "checkpoint.milestoneEverySteps": 40,
    "checkpoint.inMemory": {"sizeLimit": "7Gi"},
    "trainer.config": {"otherRate": 1},
    "trainer.command": ["python3", "other.py"],
    "trainer.offload": ["Gradients", "Optimizer"],
    "switch.settleSeconds": 7,
    "podTemplates.gpu.spec.nodeSelector": {"zone": "b"},
    "profile": "nvme",
    "podTemplates.gpu.spec.affinity": {"podAffinity": {"renamed": []}},
    "scheduling.gang": "Volcano",
    "scheduling.queuedPods": "WithDevices",
}
MAY_NOT_CHANGE = {
    "mode": "RolloutOnly",
    "model.claim.path": "other",
    "gpus.count": 7,
    "gpus.resourceName": "example.com/gpu",
    "gpus.resourceClaimTemplateName": "one",
    "rollout.offload": [],
    "rollout.prompts.reasoningGym.config": {"other_terms": 2},
    "rollout.maxPromptTokens": 7,
    "rollout.maxResponseTokens": 700,
    "rollout.batchSize": 700,
    "rollout.groupSize": 7,
    "rollout.maxStaleness": 7,
    "rollout.atMaxStaleness": "Mask",
    "rollout.spareGroups": 7,
    "rollout.incompleteBatch": "Train",
    "rollout.sampling.stop": ["7"],
    "rollout.interruption": "Retry",
    "rollout.filters": ["Truncated"],
    "rollout.filterFunctions": ["mine:keep"],
    "rollout.maxFilteredPerBatch": 7,
    "rollout.minRolloutSeconds": 7,
    "rollout.routerReplay": True,
    "rollout.unversionedTokens": "Accept",
    "rollout.overlongPenalty.factor": 7,
    "reference": None,
    "weightSync.volume.size": "7Gi",
    "checkpoint.volume.size": "7Gi",
    "storage.volume.size": "7Gi",
    "managedBy": None,
}
ONLY_ELSEWHERE = {
    "recorded",
    "restoreFrom",
    "rollout.placement",
    "rollout.replicas",
    "rollout.gpus",
    "rollout.topology",
}  # in another mode or placement


def full(name: str) -> Document:
    job: Document = copy.deepcopy(FULL)
    job["metadata"]["name"] = name
    return job


@contextlib.contextmanager
def stored(api: ApiServer, job: Document) -> Iterator[Document]:
    answer = api.request("POST", f"{JOBS}?fieldValidation=Strict", job)
    assert answer.is_accepted, answer.message
    yield answer.body
    api.request("DELETE", f"{JOBS}/{job['metadata']['name']}")


@pytest.fixture(scope="module")
def stored_job(api: ApiServer) -> Iterator[Document]:
    with stored(api, full("stored")) as job:
        yield job


def changed(job: Document, path: str, value: object) -> Document:
    job = copy.deepcopy(job)
    *parents, last = path.split(".")
    part = job["spec"]
    for name in parents:
        part = part[int(name)] if isinstance(part, list) else part[name]
    assert part.get(last) != value
    part[last] = value
    return job


def test_every_field_of_the_spec_either_may_change_or_may_not() -> None:
    changing = (*MAY_CHANGE, *MAY_CHANGE_WHILE_SUSPENDED, *MAY_NOT_CHANGE)
    depth = {path: 2 if path.startswith("rollout.") else 1 for path in (*changing, *ONLY_ELSEWHERE)}
    named = {".".join(path.split(".")[: depth[path]]) for path in depth}
    spec = {str(field.alias) for field in ColocatedRLJobSpec.model_fields.values()} - {"rollout"}
    assert named == spec | {f"rollout.{field.alias}" for field in Rollout.model_fields.values()}


def field_of(path: str) -> str:
    """The field that a change of `path` is said of: those of some parts are looked at one by one."""
    first, _, rest = path.partition(".")
    if first == "rollout":
        return f"rollout.{field_of(rest)}"
    return ".".join(path.split(".")[: 2 if first in ("gpus", "engine", "weightSync", "checkpoint", "sampling") else 1])


@pytest.mark.parametrize("path", MAY_NOT_CHANGE)
def test_change_that_cannot_be_honoured_is_refused(api: ApiServer, stored_job: Document, path: str) -> None:
    name = stored_job["metadata"]["name"]
    answer = api.request("PUT", f"{JOBS}/{name}?{DRY_RUN}", changed(stored_job, path, MAY_NOT_CHANGE[path]))
    field = field_of(path)
    assert [f"spec.{field}"] == answer.fields
    suspended = changed(stored_job, "suspend", True)
    with stored(api, suspended | {"metadata": {"name": "resting"}}) as resting:
        later = api.request("PUT", f"{JOBS}/resting?{DRY_RUN}", changed(resting, path, MAY_NOT_CHANGE[path]))
    assert answer.fields == later.fields
    words = f"{field.split('.')[-1]} can't change once the job exists: make a new job with the new value"
    assert words in answer.message


def test_a_job_keeps_what_it_went_on_from(api: ApiServer) -> None:
    with stored(api, quick_yaml.load(GOOD["restore-from"].text)) as job:
        answer = api.request("PUT", f"{JOBS}/job?{DRY_RUN}", changed(job, "restoreFrom.step", 41))
    assert ["spec.restoreFrom"] == answer.fields


def test_a_job_keeps_its_recording(api: ApiServer) -> None:
    with stored(api, quick_yaml.load(GOOD["train-only"].text)) as job:
        answer = api.request("PUT", f"{JOBS}/job?{DRY_RUN}", changed(job, "recorded.claimName", "another"))
    assert ["spec.recorded"] == answer.fields


@pytest.mark.parametrize("path", ["rollout.replicas", "rollout.gpus.count"])
def test_a_job_keeps_its_engine_pods(api: ApiServer, path: str) -> None:
    with stored(api, quick_yaml.load(GOOD["own-devices"].text)) as job:
        answer = api.request("PUT", f"{JOBS}/job?{DRY_RUN}", changed(job, path, 7))
    assert [f"spec.{field_of(path)}"] == answer.fields


def test_a_job_keeps_its_placement(api: ApiServer, stored_job: Document) -> None:
    apart = changed(changed(stored_job, "rollout.placement", "OwnDevices"), "rollout.replicas", 2)
    answer = api.request("PUT", f"{JOBS}/stored?{DRY_RUN}", apart)
    assert {"spec.rollout.placement", "spec.rollout.replicas"} == {*answer.fields}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("reference.replicas", 7),
        ("reference.gpus.count", 7),
        ("reference.gpus.image", "registry.example.com/rl/gpu:1.1"),
        ("reference.gpus.resources", {"limits": {"memory": "96Gi"}}),
        ("reference.gpus", None),
    ],
)
def test_pods_of_a_reference_may_change_while_there_are_none(api: ApiServer, path: str, value: object) -> None:
    """Its scores are those of spec.model on any devices."""
    job = quick_yaml.load(GOOD["reference-own-devices"].text)
    job["spec"]["suspend"] = True
    resting = changed_later(api, job, {"phase": "Suspended"}, path, value)
    assert resting.is_accepted, resting.message
    running = changed_later(api, job | {"spec": job["spec"] | {"suspend": False}}, {"phase": "Rollout"}, path, value)
    assert [".".join(["spec", *path.split(".")[:2]])] == running.fields
    assert re.search("set suspend to true, change it.*, and set suspend to false again", running.message)


def test_where_the_reference_computes_never_changes(api: ApiServer) -> None:
    """Batches that are sealed have its scores already, or wait for the trainers to score them."""
    job = quick_yaml.load(GOOD["reference-own-devices"].text)
    job["spec"]["suspend"] = True
    answer = changed_later(api, job, {"phase": "Suspended"}, "reference", {"placement": "WithTrainer"})
    assert ["spec.reference.placement"] == answer.fields
    assert "placement can't change once the job exists" in answer.message


@pytest.mark.parametrize("path", MAY_CHANGE)
def test_change_that_can_be_honoured_is_accepted(api: ApiServer, stored_job: Document, path: str) -> None:
    name = stored_job["metadata"]["name"]
    answer = api.request("PUT", f"{JOBS}/{name}?{DRY_RUN}", changed(stored_job, path, MAY_CHANGE[path]))
    assert answer.is_accepted, answer.message


def test_a_set_of_an_evaluation_keeps_its_source(api: ApiServer, stored_job: Document) -> None:
    """Results under one name are comparable."""
    later = changed(stored_job, "evaluation.sets.1.huggingFace.split", "test")
    answer = api.request("PUT", f"{JOBS}/stored?{DRY_RUN}", later)
    assert ["spec.evaluation.sets[1].huggingFace"] == answer.fields
    assert "give the set another name" in answer.message


def test_a_set_with_a_source_comes_while_there_are_no_pods(api: ApiServer, stored_job: Document) -> None:
    sets = [*stored_job["spec"]["evaluation"]["sets"], {"name": "sums", "reasoningGym": {"name": "chain_sum"}}]
    answer = api.request("PUT", f"{JOBS}/stored?{DRY_RUN}", changed(stored_job, "evaluation.sets", sets))
    assert ["spec.evaluation"] == answer.fields
    assert "set suspend to true, add it" in answer.message
    job = full("resting")
    job["spec"]["suspend"] = True
    with stored(api, job) as resting:
        later = changed(changed(resting, "evaluation.sets", sets), "suspend", False)
        assert api.request("PUT", f"{JOBS}/resting?{DRY_RUN}", later).is_accepted


@pytest.mark.parametrize("path", MAY_CHANGE_WHILE_SUSPENDED)
def test_what_pods_read_when_they_are_made_may_change_while_there_are_none(api: ApiServer, path: str) -> None:
    job = full("suspended")
    job["spec"]["suspend"] = True
    with stored(api, job) as suspended:
        later = changed(suspended, path, MAY_CHANGE_WHILE_SUSPENDED[path])
        assert api.request("PUT", f"{JOBS}/suspended?{DRY_RUN}", changed(later, "suspend", False)).is_accepted
        running = api.request("PUT", f"{JOBS}/suspended", changed(suspended, "suspend", False)).body
        refused = api.request(
            "PUT", f"{JOBS}/suspended?{DRY_RUN}", changed(running, path, MAY_CHANGE_WHILE_SUSPENDED[path])
        )
    assert [f"spec.{field_of(path)}"] == refused.fields
    assert re.search("set suspend to true, change it.*, and set suspend to false again", refused.message)


def changed_later(api: ApiServer, job: Document, status: Document, field: str, value: object) -> Answer:
    """Return the server's answer to a change of a job with which an operator has begun."""
    with stored(api, job) as made:
        path = f"{JOBS}/{made['metadata']['name']}"
        begun = api.request("PUT", f"{path}/status", made | {"status": {"operator": "a/b"} | status}).body
        return api.request("PUT", f"{path}?{DRY_RUN}", changed(begun, field, value))


@pytest.mark.parametrize(("phase", "is_accepted"), [("Suspended", True), ("Suspending", False), (None, False)])
def test_replicas_change_when_the_last_pod_is_gone(api: ApiServer, phase: str | None, is_accepted: bool) -> None:
    """Pods know of each other, and batches are sealed for so many ranks. None: an operator has begun with the job."""
    job = full("resting")
    job["spec"]["suspend"] = True
    answer = changed_later(api, job, {"phase": phase} if phase else {}, "replicas", 7)
    assert is_accepted == answer.is_accepted
    assert is_accepted or "change it once condition Suspended is true" in answer.message


@pytest.mark.parametrize(("before", "after", "is_accepted"), [(2, 7, True), (2, 1, True), (1, 2, False)])
def test_replicas_of_a_job_that_runs_change_where_its_pods_know_of_others(
    api: ApiServer, before: int, after: int, is_accepted: bool
) -> None:
    """Nor may the volume of checkpoints that one pod has be open to others."""
    job = full("running")
    job["spec"]["replicas"] = before
    answer = changed_later(api, job, {"groupReplicas": before}, "replicas", after)
    assert is_accepted == answer.is_accepted
    assert is_accepted or "from one to more" in answer.message


@pytest.mark.parametrize(
    ("replicas", "before", "after", "phase", "is_accepted"),
    [
        (2, 0, 1, "Rollout", True),
        (1, 1, 2, "Rollout", True),
        (1, 1, 0, "Rollout", True),
        (1, 0, 1, "Rollout", False),
        (1, 0, 1, "Suspended", True),
    ],
)
def test_one_pod_gets_no_spare_that_would_need_its_volume_too(
    api: ApiServer, replicas: int, before: int, after: int, phase: str, is_accepted: bool
) -> None:
    job = full("spared")
    job["spec"] |= {"replicas": replicas, "spares": before, "suspend": phase == "Suspended"}
    answer = changed_later(api, job, {"phase": phase}, "spares", after)
    assert is_accepted == answer.is_accepted
    assert is_accepted or "change it once condition Suspended is true" in answer.message


@pytest.mark.parametrize(
    ("field", "value", "is_accepted"),
    [
        ("evaluation", {}, True),
        ("evaluation", None, False),  # of the example: one of its sets has a source
        ("failurePolicy", None, True),
        ("managedBy", None, False),
        ("reference", None, False),
    ],
)
def test_what_can_be_added_later(api: ApiServer, field: str, value: object, is_accepted: bool) -> None:
    without = full("without")
    of_example = without["spec"].pop(field)
    with stored(api, without) as job:
        later = changed(job, field, of_example if value is None else value)
        answer = api.request("PUT", f"{JOBS}/without?{DRY_RUN}", later)
    assert is_accepted == answer.is_accepted


# ----------------------------------------------------------------------------------------------------------- property
SPEC = structural_schema(ColocatedRLJobSpec, path=".spec")
ANYTHING = st.sampled_from([None, True, 0, 1, -1, 1.5, "", "x", "1", [], {}, [1], {"a": 1}, 2**53, -(2**31)])


def near_bounds(schema: Schema) -> st.SearchStrategy[object]:
    """Values at the edge of what `schema` allows, on both sides."""
    if "enum" in schema:
        return st.sampled_from([*schema["enum"], *(text.lower() for text in schema["enum"]), ""])
    if schema.get("x-kubernetes-int-or-string"):
        return st.sampled_from(
            ["1", "1.5Gi", "1.Gi", ".5", "1e3", "01", "1 Gi", "٣", "Gi", "1ki", 0, -1, 2**53 - 1, 2**53]
        )
    match schema.get("type"):
        case "integer" | "number":
            low, high = schema["minimum"], schema["maximum"]
            return st.sampled_from([low - 1, low, low + 1, high - 1, high, high + 1, 0])
        case "string":
            low, high = schema.get("minLength", 0), schema["maxLength"]
            sizes = st.sampled_from([max(low - 1, 0), low, low + 1, high, high + 1])
            return st.builds(lambda size, unit: unit * size, sizes, st.sampled_from("a1./-_Aé😀\n ٣"))
        case "array":
            low, high = schema.get("minItems", 0), schema["maxItems"]
            sizes = st.sampled_from([max(low - 1, 0), low, low + 1, high, high + 1])
            return st.builds(lambda size, item: [item] * size, sizes, near_bounds(schema["items"]))
        case "object" if "additionalProperties" in schema:
            sizes = st.sampled_from([0, 1, schema["maxProperties"], schema["maxProperties"] + 1])
            values = near_bounds(schema["additionalProperties"])
            return st.builds(lambda size, item: {f"example.com/{i}": item for i in range(size)}, sizes, values)
        case "object":
            return st.sampled_from([{}, {"unknown": 1}])
        case _:
            return ANYTHING


def places(schema: Schema, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Schema]]:
    found = [(path, schema)] if path else []
    for name, field in schema.get("properties", {}).items():
        found += places(field, (*path, name))
    return found


@st.composite
def changes(draw: st.DrawFn) -> list[tuple[tuple[str, ...], object]]:
    made = []
    for _ in range(draw(st.integers(1, 3))):
        path, schema = draw(st.sampled_from(places(SPEC)))
        edge = near_bounds(schema)
        made.append((path, draw(st.one_of(edge, edge, edge, edge, ANYTHING))))
    return made


@settings(max_examples=300, derandomize=True)
@given(changes=changes())
def test_server_and_models_agree_around_every_bound(
    api: ApiServer, changes: list[tuple[tuple[str, ...], object]]
) -> None:
    job = full("edge")
    for path, value in changes:
        part = job["spec"]
        for name in path[:-1]:
            part = part.setdefault(name, {}) if isinstance(part, dict) else {}
        if isinstance(part, dict):
            part[path[-1]] = copy.deepcopy(value)
    answer = api.request("POST", f"{JOBS}?{DRY_RUN}", job)
    read = read_or_refuse(job)
    event("refused" if read is None else "accepted")
    assert answer.is_accepted == (read is not None), answer.message or "only the models refuse it"
    if read is not None:
        assert complete(read) == explicit(read_stored(answer.body))


def read_or_refuse(job: Document) -> ColocatedRLJob | None:
    try:
        return ColocatedRLJob.read(job)
    except ValidationError:
        return None
