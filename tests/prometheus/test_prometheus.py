"""Prometheus scrapes what the chart's monitors name, knows its alerts, and answers the dashboard's queries.

The tests run in the order of this file and share a job: the last one takes its operator away.
"""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import pytest
from e2e.conftest import NAMESPACE, OPERATOR_NAMESPACE, apply
from e2e.running_job import KubectlCall, RunningJob, wait_for
from prometheus.conftest import PROMETHEUS, Prometheus
from unit.test_documents import RULES

from colocated_rl_api import names
from setup.layout import CHECKOUT

PROMTOOL_S = 60
SCRAPED_S = 120  # after configuration has reached Prometheus, by a file that its kubelet writes once a minute
START_S = 300  # an engine and a trainer start on two cores

A_CLIENT_ASKS = """
import json, sys, urllib.request
body = json.dumps({"model": sys.argv[1], "prompt": "7 - 8 + 3 =", "max_tokens": 8}).encode()
request = urllib.request.Request("http://127.0.0.1:8080/v1/completions", body, {"Content-Type": "application/json"})
print(urllib.request.urlopen(request, timeout=120).read().decode())
"""


def promtool(*words: str | Path) -> str:
    command: list[str | Path] = [PROMETHEUS / "bin/promtool", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROMTOOL_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rules_do_what_their_cases_say(file: str) -> bool:
    promtool("check", "rules", "--lint=all", "--lint-fatal", CHECKOUT.root / "charts/colocated-rl/rules" / file)
    return "SUCCESS" in promtool("test", "rules", Path(__file__).with_name(file))


def test_alerts_fire_on_what_they_say_and_on_nothing_else() -> None:
    assert rules_do_what_their_cases_say("alerts.yaml")


def test_how_busy_a_device_is_is_recorded_with_who_has_it() -> None:
    assert rules_do_what_their_cases_say("recorded.yaml")


@pytest.fixture(scope="module")
def job(kubectl: KubectlCall) -> RunningJob:
    job = apply(kubectl, "one-pod.yaml")
    job.wait_for_step(1, deadline_s=START_S)
    assert "choices" in job.python(job.rollout_pod, names.ROLLOUT_CONTAINER, A_CLIENT_ASKS, job.name)
    return job


def targets(prometheus: Prometheus) -> list[tuple[str, str, dict[str, str]]]:
    """Return pod, health and labels of all that is scraped."""
    found = prometheus("targets", state="active")["activeTargets"]
    return [(target["labels"]["pod"], target["health"], target["labels"]) for target in found]


def test_operator_and_members_are_scraped_and_named(
    kubectl: KubectlCall, prometheus: Prometheus, job: RunningJob
) -> None:
    (gpu,) = job.gpu_pods
    operators = kubectl("-n", OPERATOR_NAMESPACE, "get", "pods", "-o", "jsonpath={.items[*].metadata.name}").split()
    wanted = sorted((pod, "up") for pod in (*operators, gpu, job.rollout_pod))

    def scraped() -> bool:
        return wanted == sorted((pod, health) for pod, health, _ in targets(prometheus))

    wait_for("all targets", scraped, deadline_s=SCRAPED_S, explain=lambda: str(targets(prometheus)))
    for pod, role in ((gpu, names.ROLE_GPU), (job.rollout_pod, names.ROLE_ROLLOUT)):
        (labels,) = (labels for its_pod, _, labels in targets(prometheus) if its_pod == pod)
        named = {"namespace": NAMESPACE, "pod": pod, "colocatedrljob": job.name, "role": role}
        assert named.items() <= labels.items()


def test_prometheus_has_the_alerts_and_none_is_on(prometheus: Prometheus, job: RunningJob) -> None:
    def loaded() -> list[dict[str, Any]]:
        return [rule for group in prometheus("rules", type="alert")["groups"] for rule in group["rules"]]

    def evaluated() -> bool:
        return len(loaded()) == len(RULES) and all(rule["health"] == "ok" for rule in loaded())

    wait_for("the alerts", evaluated, deadline_s=SCRAPED_S, explain=lambda: str(loaded()))
    assert [rule["alert"] for rule in RULES] == [rule["name"] for rule in loaded()]
    assert set() == {rule["name"] for rule in loaded() if rule["state"] == "firing"}


def as_grafana_asks(query: str) -> str:
    """Return the query as Grafana sends it with `All` in both lists."""
    return query.replace("$namespace", ".*").replace("$job", ".*")


def test_the_dashboard_shows_a_running_job(kubectl: KubectlCall, prometheus: Prometheus, job: RunningJob) -> None:
    (installed,) = json.loads(kubectl("get", "configmap", "-A", "-l", "grafana_dashboard=1", "-o", "json"))["items"]
    dashboard = json.loads(installed["data"]["colocated-rl.json"])
    missing = {
        as_grafana_asks(target["expr"]): panel["title"]
        for panel in dashboard["panels"]
        for target in panel.get("targets", [])
        if panel["title"] != "Problems that members report"  # it has none
    }

    def shows(query: str) -> bool:
        return any(math.isfinite(float(point["value"][1])) for point in prometheus.query(query))

    def have_all_shown() -> bool:
        for query in [query for query in missing if shows(query)]:
            del missing[query]
        return not missing

    job.wait_for_step(job.step + 2, deadline_s=START_S)  # a rate wants a scrape on either side of what it counts
    wait_for("each panel to show", have_all_shown, deadline_s=SCRAPED_S, explain=lambda: str(missing))  # some: a switch
    assert [job.name] == prometheus("label/colocatedrljob/values", **{"match[]": "colocate_rollout_samples"})


def test_an_alert_fires_and_ends_and_the_job_goes_on(
    kubectl: KubectlCall, prometheus: Prometheus, job: RunningJob
) -> None:
    def firing() -> set[str]:
        return {alert["labels"]["alertname"] for alert in prometheus("alerts")["alerts"] if alert["state"] == "firing"}

    kubectl("-n", OPERATOR_NAMESPACE, "scale", "deploy/colocated-rl", "--replicas=0")
    wait_for("the alert", lambda: firing() == {"ColocatedRLNoLeader"}, deadline_s=240, explain=lambda: str(firing()))
    kubectl("-n", OPERATOR_NAMESPACE, "scale", "deploy/colocated-rl", "--replicas=1")
    wait_for("the end of the alert", lambda: not firing(), deadline_s=120, explain=lambda: str(firing()))
    done = job.step
    job.wait_for_step(done + 1, deadline_s=START_S)
