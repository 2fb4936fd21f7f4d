"""A Hugging Face hub with one dataset, as far as `huggingface_hub` asks it."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

COMMIT = "e53f048856ff4f594e959d75785d2c2d37b678ee"


class FakeHub:
    """downloads: files that were asked for. revisions: that it was asked for at, the first `failures` in vain."""

    def __init__(
        self, name: str, files: Mapping[str, bytes], *, card: Mapping[str, Any] | None = None, failures: int = 0
    ) -> None:
        self._name = name
        self._files = files
        self._card = card
        self._failures = failures
        self.downloads: list[str] = []
        self.revisions: list[str] = []

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """Its address."""
        application = web.Application()
        application.add_routes(
            [
                web.get(f"/api/datasets/{self._name}/revision/{{revision}}", self._tell),
                web.get(f"/datasets/{self._name}/resolve/{COMMIT}/{{file:.*}}", self._serve),  # HEAD too
            ]
        )
        server = TestServer(application)
        await server.start_server()
        try:
            yield str(server.make_url("")).rstrip("/")
        finally:
            await server.close()

    async def _tell(self, request: web.Request) -> web.Response:
        self.revisions.append(request.match_info["revision"])
        if len(self.revisions) <= self._failures:
            return web.Response(status=503)
        siblings = [{"rfilename": name} for name in self._files]
        return web.json_response({"id": self._name, "sha": COMMIT, "siblings": siblings, "cardData": self._card})

    async def _serve(self, request: web.Request) -> web.Response:
        name = request.match_info["file"]
        body = self._files[name]
        if request.method == "GET":
            self.downloads.append(name)
        tag = hashlib.sha256(body).hexdigest()
        return web.Response(body=body, headers={"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT})
