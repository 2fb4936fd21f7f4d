"""Manifests that pages show are jobs once they are in one, and each command is run by a test or says why not."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import yaml
from documents.blocks import Block, blocks, pages

import quick_yaml
from builders import make_manifest
from colocated_rl_cli.manifest.manifest import judge
from setup.layout import CHECKOUT

BLOCKS = [block for page in pages() for block in blocks(page)]
COMMANDS = [block for block in BLOCKS if block.is_command]
VALUES = "docs/install.md"  # of the chart
PARTS = [block for block in BLOCKS if block.language == "yaml" and block.page != VALUES]
PLACES = {"failurePolicy": ("spec",), "huggingFace": ("spec", "rollout", "prompts")}  # of parts that begin below `spec`

CONFORMS = "contract/test_trainer_protocol.py::test_command_of_the_page_says_that_its_example_conforms"
LOOKS = "e2e/test_two_pods.py::test_commands_of_runbooks_and_pages_look_at_the_job"
BUILDERS = (
    "builders need root and 25 GB, which CI has not: images/test_images.py::"
    "test_image_adds_two_layers_to_its_base_ours_is_small_and_nothing_is_beside_what_is_run has podman and BuildKit "
    "build by the script of `make images`, by hand (make test-images)"
)
RUN: Mapping[str, str] = {
    "README.md": "e2e/test_demo.py::test_demo_ends_with_a_table_a_report_and_what_it_falls_short_of",
    "CONTRIBUTING.md": "these run all tests, this one too",
    "docs/air-gap.md#List the images": (
        "contract/test_deployment_pages.py::test_images_of_the_chart_are_listed_as_the_page_says and "
        "contract/test_deployment_pages.py::test_images_of_running_pods_are_listed_as_the_page_says"
    ),
    "docs/air-gap.md#Carry them": f"no registry is here; {BUILDERS}",
    "docs/air-gap.md#The command line": (
        "wheels of others come from an index; "
        "contract/test_packages.py::test_command_line_is_installed_from_a_checkout_as_its_page_says has the two folders"
    ),
    "docs/api-changes.md": (
        "contract/test_crd_versions.py::test_stored_jobs_move_to_the_next_version_as_the_page_says"
    ),
    "docs/bring-your-own.md": CONFORMS,
    "docs/cli.md": "contract/test_packages.py::test_command_line_is_installed_from_a_checkout_as_its_page_says",
    "docs/failures.md#When a job fails, and how it goes on": (
        "integration/test_cli_program.py::test_a_failed_job_is_retried_and_no_other"
    ),
    "docs/failures.md#Drills": "e2e/test_kills.py::test_f97_a_person_injects_faults_and_the_job_goes_on",
    "docs/failures.md#What may change": (
        "integration/test_operator_cluster.py::test_an_out_of_memory_is_answered_by_suspend_edit_and_resume"
    ),
    "docs/first-gpu-job.md#What you need": (
        "NVIDIA's chart is elsewhere; "
        "contract/test_pods_server.py::test_nodes_are_labelled_and_their_devices_shown_as_the_page_for_one_gpu_says "
        "has the commands of kubectl"
    ),
    "docs/first-gpu-job.md#Images": f"no k3s is here; {BUILDERS}, and brings them to nodes that run containerd",
    "docs/first-gpu-job.md#Install": (
        "contract/test_chart_install.py::test_chart_installs_and_upgrades_as_the_pages_say and "
        "contract/test_packages.py::test_command_line_is_installed_from_a_checkout_as_its_page_says"
    ),
    "docs/first-gpu-job.md#From flags to fields": (
        "contract/test_deployment_pages.py::test_the_token_of_the_page_for_one_gpu_is_where_pods_look_for_it"
    ),
    "docs/first-gpu-job.md#The job": (
        "unit/test_cli_validate.py::test_the_job_of_the_page_for_one_gpu_is_judged_as_it_says and "
        "contract/test_pods_server.py::test_every_pod_of_the_jobs_for_gpu_nodes_is_accepted"
    ),
    "docs/first-gpu-job.md#Ask it": ("e2e/test_two_pods.py::test_the_gateway_answers_as_the_page_for_one_gpu_asks_it"),
    "docs/first-gpu-job.md#Watch it": LOOKS,
    "docs/gpus.md#A first job on one GPU": (
        "unit/test_cli_validate.py::test_the_first_job_for_a_gpu_is_written_and_judged_as_the_page_says"
    ),
    "docs/gpus.md#On a machine without a network": (
        "contract/test_gpu_kit.py::test_unpacked_kit_is_the_working_tree_and_says_what_the_machine_has and "
        "contract/test_gpu_kit.py::test_unpacked_kit_needs_nothing_else, on a CPU"
    ),
    "docs/install.md#Images": BUILDERS,
    "docs/install.md#On kind": f"no kind is here; {BUILDERS}",
    "docs/install.md#The chart": "contract/test_chart_install.py::test_chart_installs_and_upgrades_as_the_pages_say",
    "docs/install.md#Without Helm": "contract/test_chart_rendering.py::test_bundle_is_the_chart_and_kubectl_takes_it",
    "docs/multi-tenancy.md#Another operator for the same jobs": (
        "integration/test_operator_cluster.py::"
        "test_two_releases_that_watch_one_namespace_do_not_fight_over_its_job_and_a_third_takes_it_over"
    ),
    "docs/multi-tenancy.md": (
        "contract/test_pods_server.py::test_pods_are_admitted_wherever_their_model_comes_from "
        "has pods in a namespace with that label"
    ),
    "docs/one-side.md": "e2e/test_one_side.py::test_a_job_without_an_engine_trains_them",
    "docs/openshift.md#The operator": (
        "contract/test_deployment_pages.py::test_no_pod_of_the_chart_has_a_user_with_the_words_of_the_page_for_openshift"
    ),
    "docs/releases.md": "contract/test_chart_install.py::test_chart_installs_and_upgrades_as_the_pages_say",
    "docs/runbooks/job-failed.md#What to do": (
        "integration/test_cli_program.py::test_a_failed_job_is_retried_and_no_other"
    ),
    "docs/runbooks/operations.md#A node is lost": "a node of its own would have to go for good",
    "docs/runbooks/operations.md#An evaluation now": (
        "unit/test_plan.py::test_an_evaluation_is_made_on_request_once_its_period_is_one has what the patch asks for; "
        "e2e/test_tutorial.py::test_every_command_of_the_tutorial_does_what_it_says patches and lists"
    ),
    "docs/runbooks/operations.md#Preemption, maintenance, spot nodes": (
        "e2e/test_upgrade.py::test_a_node_is_drained_and_the_job_goes_on_after_it"
    ),
    "docs/runbooks/operations.md#More or fewer GPUs": (
        "e2e/test_two_pods.py::test_a_job_that_runs_goes_on_in_fewer_pods_with_the_samples_that_it_had and "
        "e2e/test_two_pods.py::test_a_suspended_job_has_no_pods_and_goes_on_in_more_with_the_samples_that_it_had"
    ),
    "docs/runbooks/operations.md#A job's deletion hangs": (
        "contract/test_chart_install.py::test_a_job_whose_operator_is_gone_for_good_is_released_as_the_runbook_says"
    ),
    "docs/runbooks/operations.md#The operator's authority is lost": (
        "integration/test_operator_cluster.py::test_a_job_gets_on_with_another_authority_as_the_runbook_says"
    ),
    "docs/runbooks/backup.md": (
        "e2e/test_one_side.py::test_a_lost_job_goes_on_from_a_copy_of_its_checkpoints_as_if_it_had_never_ended"
    ),
    "docs/runbooks/store-near-full.md#What to do": (
        "storage/test_storage.py::"
        "test_a_job_whose_store_is_nearly_full_goes_on_once_its_claim_is_expanded_as_the_runbook_says has another size"
    ),
    "docs/runbooks/ca-rotation.md#By cert-manager": (
        "cert-manager's controller is built by hand (make e2e-cert-manager): "
        "cert_manager/test_cert_manager.py::test_its_renewals_are_followed_in_steps_under_a_running_job has it make "
        "another authority by a renewal, not by a deletion"
    ),
    "docs/runbooks/ca-rotation.md": (
        "contract/test_deployment_pages.py::test_commands_tell_whom_a_job_trusts_and_until_when, "
        "contract/test_deployment_pages.py::test_an_authority_is_restored_from_the_two_files_of_the_page, "
        "integration/test_operator_cluster.py::test_a_job_gets_on_with_another_authority_as_the_runbook_says and "
        "e2e/test_one_side.py::test_a_lost_job_goes_on_from_a_copy_of_its_checkpoints_as_if_it_had_never_ended"
    ),
    "docs/runbooks": LOOKS,
    "docs/samples.md#Follow": (
        "integration/test_cli_samples.py::test_samples_are_reported_as_they_end_until_the_job_is_over"
    ),
    "docs/samples.md#In a browser": (
        "e2e/test_two_pods.py::test_the_page_of_a_job_is_behind_the_port_that_kubectl_forwards"
    ),
    "docs/samples.md#When the job is over, or suspended": (
        "integration/test_rollout_process.py::test_samples_of_a_job_that_is_over_are_read_from_a_copy_of_its_store"
    ),
    "docs/samples.md": LOOKS,
    "docs/tutorial.md": "e2e/test_tutorial.py::test_every_command_of_the_tutorial_does_what_it_says",
    "examples/arithmetic/README.md": (
        "e2e/test_demo.py::test_demo_ends_with_a_table_a_report_and_what_it_falls_short_of"
    ),
    "examples/environments/README.md": (
        "integration/test_rollout_environments.py::test_episodes_of_an_environment_with_tools_are_trained_over_a_switch"
    ),
    "examples/own_trainer/README.md": CONFORMS,
}
"""The test that runs the commands, or why none does: by page and heading, by page, or by folder.

Tests are named from `tests/` on.
"""


def merged(whole: dict[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    """Objects into objects; anything else in the place of what was there."""
    result = dict(whole)
    for name, value in part.items():
        both = isinstance(value, dict) and isinstance(result.get(name), dict) and name != "prompts"
        result[name] = merged(result[name], value) if both else value
    return result


def as_job(written: dict[str, Any]) -> dict[str, Any]:
    if written.get("kind") == "ColocatedRLJob":
        return written
    for name in reversed(PLACES.get(next(iter(written)), ())):
        written = {name: written}
    whole = make_manifest("sums")
    if "model" in written.get("spec", {}):
        del whole["spec"]["model"]  # one place or another
    return merged(whole, written)


@pytest.mark.parametrize("block", PARTS, ids=lambda block: f"{block.page}#{block.heading}")
def test_manifest_of_a_page_is_one_that_the_api_server_accepts(block: Block) -> None:
    documents = [one for one in quick_yaml.load_all(block.text) if one.get("kind") in (None, "ColocatedRLJob")]
    assert documents
    for written in documents:
        verdict = judge(yaml.safe_dump(as_job(written)))
        assert verdict.is_accepted, verdict.faults


def how_it_is_run(block: Block) -> str | None:
    folder = block.page.rpartition("/")[0]
    return next((RUN[key] for key in (f"{block.page}#{block.heading}", block.page, folder) if key in RUN), None)


@pytest.mark.parametrize("block", COMMANDS, ids=lambda block: f"{block.page}#{block.heading}")
def test_command_of_a_page_is_run_by_a_test_or_it_is_said_why_not(block: Block) -> None:
    if block.page.startswith("tests/"):
        return  # for who works on the tests
    how = how_it_is_run(block)
    assert how, f"a test for {block.commands}, in RUN"
    for file, name in re.findall(r"(\w+/\w+\.py)::(\w+)", how):
        assert f"def {name}(" in (CHECKOUT.root / "tests" / file).read_text()


def test_no_entry_of_the_table_is_for_a_command_that_is_nowhere() -> None:
    used = {id(how) for block in COMMANDS if (how := how_it_is_run(block))}
    assert [] == [key for key, how in RUN.items() if id(how) not in used]


@pytest.mark.parametrize("block", COMMANDS, ids=lambda block: f"{block.page}#{block.heading}")
def test_target_of_make_is_one(block: Block) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (CHECKOUT.root / "Makefile").read_text(), flags=re.MULTILINE))
    assert {word for command in block.commands for word in re.findall(r"^make ([a-z0-9-]+)", command)} <= targets
