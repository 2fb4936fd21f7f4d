"""A Hugging Face hub with one dataset and one model, as far as `huggingface_hub` asks it.

`python hub.py PORT DIRECTORY NAME` serves a model's directory, in a container that has nothing else of the tests.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aiohttp import web

COMMIT = "e53f048856ff4f594e959d75785d2c2d37b678ee"
SMALL = 1024  # bytes; larger files are kept, and hashed, as Git's large files


class FakeHub:
    """Serves files as the hub does.

    downloads: files that were asked for. revisions: that it was asked for at, the first `failures` in vain.

    files: of the dataset and of the model. token: without it nobody is answered. instead: what is sent of a file that
    is damaged on its way; its hash stays that of the file. listing: what is sent in place of the list of files.
    """

    def __init__(
        self,
        name: str,
        files: Mapping[str, bytes],
        *,
        card: Mapping[str, Any] | None = None,
        failures: int = 0,
        token: str | None = None,
    ) -> None:
        self._name = name
        self._files = files
        self._card = card
        self._failures = failures
        self._token = token
        self.instead: dict[str, bytes] = {}
        self.listing: bytes | None = None
        self.downloads: list[str] = []
        self.revisions: list[str] = []

    def application(self) -> web.Application:
        application = web.Application()
        application.add_routes(
            [
                web.get(f"/api/datasets/{self._name}/revision/{{revision}}", self._describe),
                web.get(f"/api/models/{self._name}/tree/{COMMIT}", self._list),
                web.get(f"/datasets/{self._name}/resolve/{COMMIT}/{{file:.*}}", self._serve),  # HEAD too
                web.get(f"/{self._name}/resolve/{COMMIT}/{{file:.*}}", self._serve),
            ]
        )
        return application

    def _check(self, request: web.Request, revision: str) -> None:
        self.revisions.append(revision)
        if len(self.revisions) <= self._failures:
            raise web.HTTPServiceUnavailable
        if self._token is not None and request.headers.get("Authorization") != f"Bearer {self._token}":
            raise web.HTTPUnauthorized(headers={"X-Error-Code": "GatedRepo"})

    async def _describe(self, request: web.Request) -> web.Response:
        self._check(request, request.match_info["revision"])
        siblings = [{"rfilename": name} for name in self._files]
        return web.json_response({"id": self._name, "sha": COMMIT, "siblings": siblings, "cardData": self._card})

    async def _list(self, request: web.Request) -> web.Response:
        self._check(request, COMMIT)
        if self.listing is not None:
            return web.Response(body=self.listing, content_type="application/json")
        return web.json_response([_entry(name, body) for name, body in self._files.items()])

    async def _serve(self, request: web.Request) -> web.Response:
        name = request.match_info["file"]
        body = self._files[name]
        if request.method == "GET":
            self.downloads.append(name)
        tag = hashlib.sha256(body).hexdigest()
        headers = {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT}
        return web.Response(body=self.instead.get(name, body), headers=headers)


def _entry(name: str, body: bytes) -> dict[str, Any]:
    blob = hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()
    entry: dict[str, Any] = {"type": "file", "path": name, "size": len(body), "oid": blob}
    if len(body) > SMALL:
        entry["lfs"] = {"oid": hashlib.sha256(body).hexdigest(), "size": len(body), "pointerSize": 134}
    return entry


if __name__ == "__main__":
    port, directory, name = sys.argv[1:]
    served = {path.name: path.read_bytes() for path in Path(directory).iterdir() if path.is_file()}
    web.run_app(FakeHub(name, served).application(), port=int(port))
