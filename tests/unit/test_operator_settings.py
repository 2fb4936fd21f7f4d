"""Every mistake in the process's settings is one line that names the variable, its value and what is expected."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from colocated_rl_api.scheduling import Gang
from colocated_rl_operator.clients.cluster import find_cluster
from colocated_rl_operator.clients.errors import BadSetting
from colocated_rl_operator.manifests.gangs import NO_GANGS, Gangs
from colocated_rl_operator.manifests.profiles import Profile
from colocated_rl_operator.planner.observation import Observation
from colocated_rl_operator.settings import OperatorSettings
from colocated_rl_operator.simulate import observation

ENVIRONMENT = {"OPERATOR_NAMESPACE": "rl", "AGENT_IMAGE": "a", "ROLLOUT_IMAGE": "r", "GPU_IMAGE": "g", "POD_NAME": "me"}


def test_defaults() -> None:
    settings = OperatorSettings.read(ENVIRONMENT)
    assert ("rl", "me", (), 9090, "INFO") == (
        settings.namespace,
        settings.identity,
        settings.watch_namespaces,
        settings.metrics_port,
        settings.log_level,
    )
    assert (15, 10, 2) == (settings.lease.duration_s, settings.lease.renew_deadline_s, settings.lease.retry_s)


def test_namespaces_are_a_list() -> None:
    assert ("a", "b") == OperatorSettings.read(ENVIRONMENT | {"WATCH_NAMESPACES": " a, b,"}).watch_namespaces


def test_jobs_of_other_operators_are_taken_over_where_that_is_said() -> None:
    assert frozenset() == OperatorSettings.read(ENVIRONMENT).takes_over
    settings = OperatorSettings.read(ENVIRONMENT | {"TAKE_OVER": "old/rl, older/rl", "LEASE_NAME": "new"})
    assert ("rl/new", frozenset({"old/rl", "older/rl"})) == (settings.release, settings.takes_over)


def test_f97_faults_are_injected_only_where_that_is_said() -> None:
    assert not OperatorSettings.read(ENVIRONMENT).images.takes_faults
    assert OperatorSettings.read(ENVIRONMENT | {"FAULT_INJECTION": "true"}).images.takes_faults
    assert OperatorSettings.read(ENVIRONMENT).images.requests_disk
    assert not OperatorSettings.read(ENVIRONMENT | {"REQUEST_DISK": "false"}).images.requests_disk


def test_an_admin_writes_profiles_in_the_words_of_a_template_and_one_allows_nothing_by_default() -> None:
    assert {"default": Profile()} == OperatorSettings.read(ENVIRONMENT).images.profiles.by_name
    text = """{"nvme": {"namespaces": ["research"], "gpu": {"hostNetwork": true, "hostPaths": ["/mnt/nvme"]},
        "rollout": {"defaults": {"tolerations": [{"key": "cpu"}]}, "fixed": ["tolerations", "dnsPolicy"]}}}"""
    written = OperatorSettings.read(ENVIRONMENT | {"PROFILES": text}).images.profiles.by_name
    assert ["default", "nvme"] == [*written]
    of_gpu, of_rollout = written["nvme"].gpu, written["nvme"].rollout
    assert (["research"], ["/mnt/nvme"]) == (written["nvme"].namespaces, of_gpu.host_paths)
    assert (True, False) == (of_gpu.host_network, of_rollout.host_network)
    assert ["cpu"] == [each.key for each in of_rollout.defaults.tolerations]
    assert ["tolerations", "dnsPolicy"] == of_rollout.fixed


def test_users_come_from_namespaces_only_where_an_admin_says_so() -> None:
    assert [False, True] == [
        OperatorSettings.read(ENVIRONMENT | named).users_of_namespaces for named in ({}, {"NAMESPACE_USERS": "true"})
    ]


def test_nodes_are_tainted_only_where_an_admin_says_so() -> None:
    assert [False, True] == [
        OperatorSettings.read(ENVIRONMENT | named).taints_nodes for named in ({}, {"TAINT_NODES": "true"})
    ]


def test_a_condition_may_be_bad_with_several_statuses() -> None:
    named = {"BAD_NODE_CONDITIONS": "GPUHealthy=False,GPUHealthy=Unknown"}
    signs = OperatorSettings.read(ENVIRONMENT | named).node_signs
    assert {("GPUHealthy", "False"), ("GPUHealthy", "Unknown")} == signs.bad_conditions


def test_gangs_are_in_the_order_of_the_clusters_choice() -> None:
    assert NO_GANGS == OperatorSettings.read(ENVIRONMENT).images.gangs
    named = {"GANGS": "None, Volcano,Coscheduling", "GANG_SCHEDULERS": "Volcano=volcano,Coscheduling=mine"}
    expected = Gangs((Gang.NONE, Gang.VOLCANO, Gang.COSCHEDULING), {Gang.VOLCANO: "volcano", Gang.COSCHEDULING: "mine"})
    assert expected == OperatorSettings.read(ENVIRONMENT | named).images.gangs


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OPERATOR_NAMESPACE", ""),
        ("GPU_IMAGE", " "),
        ("LEASE_DURATION_S", "soon"),
        ("LEASE_RENEW_DEADLINE_S", "20"),
        ("LEASE_RETRY_S", "-1"),
        ("METRICS_PORT", "99999"),
        ("LOG_LEVEL", "loud"),
        ("IMAGE_PULL_POLICY", "Sometimes"),
        ("FAULT_INJECTION", "maybe"),
        ("REQUEST_DISK", "maybe"),
        ("PROFILES", "gpu"),
        ("PROFILES", '{"nvme": {"trainer": {}}}'),
        ("PROFILES", '{"nvme": {"gpu": {"hostPath": "/mnt"}}}'),
        ("PROFILES", '{"nvme": {"gpu": {"hostPaths": ["mnt"]}}}'),
        ("PROFILES", '{"nvme": {"gpu": {"defaults": {"hostNetwork": true}}}}'),
        ("PROFILES", '{"nvme": {"gpu": {"fixed": ["volumes"]}}}'),
        ("TAKE_OVER", "old/colocated-rl,older"),
        ("TAKE_OVER", "old/colocated-rl/x"),
        ("GANGS", "Volcano,Slurm"),
        ("GANG_SCHEDULERS", "Slurm=slurm"),
        ("GANG_SCHEDULERS", "Volcano"),
    ],
)
def test_a_bad_value_is_named(name: str, value: str) -> None:
    with pytest.raises(BadSetting, match=name):
        OperatorSettings.read(ENVIRONMENT | {name: value})


def test_the_service_account_needs_no_name_resolution(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("first\n")
    (tmp_path / "ca.crt").write_text("pem")
    environment = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    access = find_cluster(environment, service_account=tmp_path)
    assert "https://[fd00::1]:6443" == access.server
    (tmp_path / "token").write_text("rotated")
    assert {"Authorization": "Bearer rotated"} == access.headers()


def test_a_kubeconfig_is_read_by_its_current_context(tmp_path: Path) -> None:
    path = tmp_path / "config"
    config = {
        "current-context": "b",
        "contexts": [{"name": name, "context": {"cluster": name, "user": name}} for name in "ab"],
        "clusters": [
            {
                "name": name,
                "cluster": {
                    "server": f"https://{name}/",
                    "certificate-authority-data": base64.b64encode(b"ca").decode(),
                },
            }
            for name in "ab"
        ],
        "users": [{"name": name, "user": {"token": name}} for name in "ab"],
    }
    path.write_text(yaml.safe_dump(config))
    access = find_cluster({"KUBECONFIG": str(path)}, service_account=tmp_path / "none")
    assert ("https://b", "ca", "b") == (access.server, access.ca_pem, access.token())


@pytest.mark.parametrize("text", ["", "[]", "current-context: x", "{"])
def test_a_kubeconfig_that_leads_nowhere_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config"
    path.write_text(text)
    with pytest.raises(BadSetting, match="KUBECONFIG"):
        find_cluster({"KUBECONFIG": str(path)}, service_account=tmp_path / "none")


def test_the_process_ends_with_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "colocated_rl_operator"], env={}, capture_output=True, text=True, timeout=60, check=False
    )
    assert 2 == done.returncode
    assert 1 == done.stderr.count("\n")
    assert "OPERATOR_NAMESPACE" in done.stderr


def test_a_plan_can_be_read_off_a_file_without_a_cluster(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "colocated_rl_operator.simulate"]
    example = subprocess.run([*command, "--example"], capture_output=True, timeout=60, check=True).stdout
    assert isinstance(observation.validate_json(example), Observation)
    path = tmp_path / "seen.json"
    path.write_bytes(example)
    printed = subprocess.run([*command, str(path)], capture_output=True, timeout=60, check=True).stdout
    assert ["gpu-0", "gpu-1", "rollout"] == [pod["seat"] for pod in json.loads(printed)["pods"]]
