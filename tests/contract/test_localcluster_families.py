"""The local cluster has IPv4, IPv6 or both, and pods of two nodes reach one another and the API server by each."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.release]

START_S = 180.0  # for a pod, on a machine that is busy with all the others
API = (
    "T=/var/run/secrets/kubernetes.io/serviceaccount; curl -s -o /dev/null -w '%{http_code}' --cacert $T/ca.crt"
    ' -H "Authorization: Bearer $(cat $T/token)" https://kubernetes.default.svc/api/v1/namespaces/default/pods/web1'
    ' --resolve "kubernetes.default.svc:443:$KUBERNETES_SERVICE_HOST"'
)


@pytest.fixture(scope="module", params=["IPv6", "IPv6,IPv4", "IPv4,IPv6"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    directory = Path(tempfile.mkdtemp(prefix="cluster-"))  # short, as sockets lie in it
    images = directory / "images.yaml"
    images.write_text(json.dumps({"images": {"machine": {}}}))
    options = ("--nodes=2", f"--ip-families={request.param}")
    with Cluster.up(directory / "c", images=images, options=options) as cluster:
        yield cluster
    shutil.rmtree(directory)


def test_pods_of_two_nodes_reach_one_another_and_the_api_server(
    cluster: Cluster, request: pytest.FixtureRequest
) -> None:
    names = request.node.callspec.params["cluster"].split(",")
    for node in (1, 2):
        container = {
            "name": "c",
            "image": "machine",
            "command": ["python3", "-m", "http.server", "--bind=::", "8000"],
            "readinessProbe": {"httpGet": {"port": 8000}, "periodSeconds": 1, "timeoutSeconds": 10},
        }
        spec = {"nodeName": f"node{node}", "containers": [container], "terminationGracePeriodSeconds": 1}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"web{node}"}, "spec": spec}
        cluster.kubectl("apply", "-f", "-", stdin=json.dumps(pod))
    cluster.kubectl("wait", "--for=condition=Ready", "pod/web1", "pod/web2", f"--timeout={START_S:.0f}s")
    account = "system:serviceaccount:default:default"
    cluster.kubectl("create", "clusterrolebinding", "looks", "--clusterrole=view", f"--user={account}")
    assert names[:1] == cluster.get("service", "kubernetes")["spec"]["ipFamilies"], "it asks for one"
    for name, other in (("web1", "web2"), ("web2", "web1")):
        addresses = [each["ip"] for each in cluster.get("pod", other)["status"]["podIPs"]]
        assert names == ["IPv6" if ":" in each else "IPv4" for each in addresses]
        for address in addresses:
            url = f"http://[{address}]:8000/" if ":" in address else f"http://{address}:8000/"
            assert "200" == cluster.kubectl(
                *("exec", name, "--", "curl", "-s", "-g", "-o", "/dev/null", "-w", "%{http_code}", "-m", "20", url)
            )
        assert "200" == cluster.kubectl("exec", name, "--", "bash", "-c", API)
