"""Make a support archive: everything known of a job in one file, without secrets and without samples.

Objects are read with the caller's rights, Secrets never; everything passes `scrubbing`. The archive also lists what
could not be read, with the reason, because a bundle is most needed when the cluster is broken.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from colocated_rl_api import __version__, names
from colocated_rl_api.logs import printable
from colocated_rl_cli.base.errors import CliError
from colocated_rl_cli.base.yaml_text import written
from colocated_rl_cli.cluster.api import Api, Object
from colocated_rl_cli.cluster.pages import page, text_page
from colocated_rl_cli.evidence.evidence import has_pages
from colocated_rl_cli.support.scrubbing import scrub, scrub_text

README = """\
A support archive of job {job}, made by kubectl crlj bundle {version} at {at}.

job.yaml, pods/*.yaml, claims.yaml, events.yaml   objects as the API server had them
explanation.txt                                   the output of kubectl crlj explain
pods/POD/CONTAINER.log, .previous.log             logs, as far as kubelet keeps them
pods/POD/state.json, progress.json, metrics.txt   the members' own pages
operator/                                         the operator's pods and logs, where asked for
not-read.txt                                      what could not be read, and why

Not in it: Secrets, values of environment variables, and whatever else looked like a secret: each is replaced by
[removed]. Nor prompts and responses, unless a program of the job has printed them: see the logs of the containers
rewards and gpu. Look at it before you send it.
"""


class Bundle:
    """Collects the files of an archive; all of them lie below one folder."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._files: dict[str, str] = {}
        self._not_read: list[str] = []

    def readme(self, content: str) -> None:
        """Add README.txt, our own text, which needs no scrubbing."""
        self._files["README.txt"] = content

    def text(self, name: str, content: str) -> None:
        """Add a text file, scrubbed, and without what a terminal would obey that somebody shows it on."""
        self._files[name] = printable(scrub_text(content.replace("\r\n", "\n").replace("\r", "\n")))

    def document(self, name: str, content: Any) -> None:
        """Add plain data as JSON or YAML, by the ending of the name, scrubbed."""
        scrubbed = scrub(content)
        is_json = name.endswith(".json")
        self._files[name] = json.dumps(scrubbed, indent=1) if is_json else printable(written(scrubbed))

    async def read(self, name: str, ask: Callable[[], Awaitable[Any]]) -> None:
        """Add the answer to `ask`, or note why there is none."""
        try:
            content = await ask()
        except CliError as error:
            self._not_read.append(f"{name}: {error}")
            return
        if isinstance(content, str):
            self.text(name, content)
        else:
            self.document(name, content)

    async def listed(self, name: str, ask: Callable[[], Awaitable[list[Object]]]) -> list[Object]:
        """Return the answer to `ask`; if there is none, note why and return an empty list."""
        try:
            return await ask()
        except CliError as error:
            self._not_read.append(f"{name}: {error}")
            return []

    @property
    def names(self) -> list[str]:
        return sorted(self._files)

    def write(self, path: str) -> None:
        """Write a new file that only its owner may read. Raises OSError."""
        if self._not_read:
            self.text("not-read.txt", "\n".join(dict.fromkeys(self._not_read)) + "\n")
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w:gz") as archive:
            for name in self.names:
                body = self._files[name].encode()
                entry = tarfile.TarInfo(f"{self._folder}/{name}")
                entry.size, entry.mtime, entry.mode = len(body), int(time.time()), 0o600
                archive.addfile(entry, io.BytesIO(body))
        with open(path, "xb", opener=partial(os.open, mode=0o600)) as file:
            file.write(content.getvalue())


async def collect(
    api: Api, job: Object, explanation: Callable[[], Awaitable[str]], *, operator: str | None = None
) -> Bundle:
    """Collect everything about a job. operator: the operator's namespace, to add its pods; None leaves them out."""
    name = job["metadata"]["name"]
    made = Bundle(f"{name}-bundle")
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    made.readme(README.format(job=f"{api.namespace}/{name}", version=__version__, at=at))
    made.document("job.yaml", job)
    await made.read("explanation.txt", explanation)
    await made.read("version.json", lambda: api.get("/version", what="the API server's version"))
    await made.read("claims.yaml", lambda: _claims(api, name))
    pods = await made.listed("pods", lambda: api.pods_of(name))
    events: list[Object] = []
    for one in (job, *pods):
        events += await made.listed("events.yaml", partial(api.events_about, one["metadata"]["uid"]))
    made.document("events.yaml", events)
    for pod in pods:
        await _pod(api, made, pod, folder="pods")
        await _pages(api, made, pod)
    if operator is not None:
        other = Api(api.session, operator)
        for pod in await made.listed("operator", other.operators):
            await _pod(other, made, pod, folder="operator")
    return made


async def _pod(api: Api, made: Bundle, pod: Object, *, folder: str) -> None:
    """Add a pod's object and its logs."""
    name, status = pod["metadata"]["name"], pod.get("status", {})
    made.document(f"{folder}/{name}.yaml", pod)
    for container in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
        log = partial(api.log, name, container["name"])
        if container.get("restartCount"):
            await made.read(f"{folder}/{name}/{container['name']}.previous.log", partial(log, previous=True))
        if "waiting" not in container.get("state", {}):
            await made.read(f"{folder}/{name}/{container['name']}.log", log)


async def _pages(api: Api, made: Bundle, pod: Object) -> None:
    """Add a member's own pages."""
    name = pod["metadata"]["name"]
    if pod.get("status", {}).get("phase") != "Running":
        return
    if has_pages(pod):
        await made.read(f"pods/{name}/state.json", lambda: page(api, name, "/v1/state"))
    if pod["metadata"]["labels"].get(names.ROLE_LABEL) == names.ROLE_ROLLOUT:
        await made.read(f"pods/{name}/progress.json", lambda: page(api, name, "/v1/progress"))
    await made.read(f"pods/{name}/metrics.txt", lambda: text_page(api, name, "/metrics", port=names.METRICS_PORT))


async def _claims(api: Api, job: str) -> Any:
    query = {"labelSelector": f"{names.JOB_NAME_LABEL}={job}"}
    path = f"/api/v1/namespaces/{api.namespace}/persistentvolumeclaims"
    return (await api.get(path, what=f"claims of job {job}", query=query))["items"]
