"""The page to watch a job on, as far as it can be seen without a browser: `make test-page` opens it in Chromium."""

from __future__ import annotations

import re
from base64 import b64decode
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path

import pytest
from unit.test_rollout_followers import serving
from unit.test_rollout_store import JOB, completed_group

from colocated_rl_api.holders import PodHolder
from colocated_rl_api.rungs import Placement
from colocated_rl_rollout.pages.interface import interface
from colocated_rl_rollout.pages.watch import document
from colocated_rl_rollout.rules.holders import holder_behind
from colocated_rl_rollout.store.store import Store


class Elements(HTMLParser):
    """Collects the elements of a document with their attributes, and the contents of those that the policy names."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.contents: dict[str, str] = {}
        self._within = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        self._within = tag

    def handle_endtag(self, tag: str) -> None:
        self._within = ""

    def handle_data(self, data: str) -> None:
        if self._within in ("script", "style"):
            self.contents[self._within] = self.contents.get(self._within, "") + data


TEXT, POLICY = document()
PAGE = Elements(TEXT)
SCRIPT = PAGE.contents["script"]


async def test_it_is_the_same_document_whatever_samples_say_and_comes_with_its_policy(tmp_path: Path) -> None:
    store = Store(tmp_path, job_uid=JOB)
    completed_group(store)
    await store.flushed()
    async with serving(store, text=lambda ids: "<script>owned</script>") as scene, scene.client.get("/") as response:
        assert (200, "text/html", TEXT) == (response.status, response.content_type, await response.text())
        assert POLICY == response.headers["Content-Security-Policy"]
        named = ("X-Content-Type-Options", "Referrer-Policy", "Cache-Control", "Cross-Origin-Opener-Policy")
        assert ["nosniff", "no-referrer", "no-store", "same-origin"] == [response.headers[name] for name in named]
        async with scene.client.post("/") as refused:
            assert 405 == refused.status


def test_the_policy_lets_the_documents_own_script_and_style_run_and_nothing_else() -> None:
    directives = dict(directive.split(" ", 1) for directive in POLICY.split("; "))
    for tag in ("script", "style"):
        algorithm, digest = directives.pop(f"{tag}-src").strip("'").split("-", 1)
        assert ("sha256", sha256(PAGE.contents[tag].encode()).digest()) == (algorithm, b64decode(digest))
        assert 1 == [name for name, _ in PAGE.elements].count(tag)
    assert {
        "default-src": "'none'",
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    } == directives


def test_it_loads_nothing_and_has_no_script_in_an_attribute() -> None:
    for tag, attributes in PAGE.elements:
        loads = {name: value for name, value in attributes.items() if name in ("src", "href", "srcset", "action")}
        assert tag == "link" or {} == loads
        assert all(value.startswith("data:image/svg+xml,") for value in loads.values())
        assert [] == [name for name in attributes if name.startswith("on") or name == "style"]
    assert [] == re.findall(r"https?:(?!//www\.w3\.org/2000/svg)", TEXT)


SINKS = (
    *(
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "createContextualFragment",
        "DOMParser",
        "srcdoc",
    ),
    *("eval(", "Function(", "import(", "javascript:", 'setAttribute("on', "localStorage", "cookie", "postMessage"),
)


@pytest.mark.parametrize("sink", SINKS)
def test_the_script_makes_no_html_or_code_of_text_and_keeps_nothing(sink: str) -> None:
    assert sink not in SCRIPT


def test_the_script_only_asks_for_pages_that_exist_by_get() -> None:
    assert [] == re.findall(r"method|XMLHttpRequest|sendBeacon|WebSocket|EventSource", SCRIPT)
    asked = set(re.findall(r"[\"'`](/[\w/.]*)", SCRIPT))
    assert {"/v1/state", "/v1/progress", "/v1/batches", "/v1/evaluations", "/v1/samples"} == asked
    assert all("get" in interface()["paths"][path] for path in asked)
    assert 2 == SCRIPT.count("fetch(")


def test_every_element_that_the_script_writes_to_is_there_once() -> None:
    ids = [attributes["id"] for _, attributes in PAGE.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"\bat\(\"([\w-]+)\"\)", SCRIPT)) <= set(ids)


def test_it_can_be_used_without_a_mouse_and_without_seeing_it() -> None:
    fields = {attributes["id"] for tag, attributes in PAGE.elements if tag in ("input", "select")}
    labels = [tag for tag, _ in PAGE.elements].count("label")  # each around its field
    assert (3, {"query", "state", "live"}) == (labels, fields)
    ids = {attributes.get("id") for _, attributes in PAGE.elements}
    for _, attributes in PAGE.elements:
        assert attributes.get("aria-labelledby") in {None, *ids}
        if attributes.get("class") == "wide":  # scrolled by keys
            assert "0" == attributes["tabindex"]
            assert attributes.get("aria-label") or attributes.get("aria-labelledby")
    assert ("html", {"lang": "en"}) == PAGE.elements[0]


@pytest.mark.parametrize(
    ("is_open", "placement", "sealed", "holder", "why"),
    [
        (True, Placement.TIME_SLICED, 8, PodHolder.ROLLOUT, "its gate is open"),
        (False, Placement.TIME_SLICED, 8, None, "batch 8 waits for training"),
        (False, Placement.TIME_SLICED, 7, None, "no batch waits for training"),
        (True, Placement.RESIDENT, 7, PodHolder.ROLLOUT, "its gate is open"),
        (True, Placement.RESIDENT, 8, PodHolder.BOTH, "batch 8 waits for training"),
        (False, Placement.RESIDENT, 8, None, "takes new weights"),
        (True, Placement.DISAGGREGATED, 8, PodHolder.ROLLOUT, "its gate is open"),
        (False, Placement.DISAGGREGATED, 8, None, "takes new weights"),
        (True, Placement.MIXED, 8, PodHolder.ROLLOUT, "its gate is open"),
        (False, Placement.MIXED, 8, None, "batch 8 waits for training"),
        (True, Placement.ROLLOUT_ONLY, 8, PodHolder.ROLLOUT, "its gate is open"),
        *((None, placement, 8, None, "does not answer") for placement in Placement),
    ],
)
def test_who_has_a_gpu_is_said_as_far_as_its_gate_shows_it(
    is_open: bool | None, placement: Placement, sealed: int, holder: PodHolder | None, why: str
) -> None:
    found, reason = holder_behind(is_open, placement, sealed=sealed, trained=7)
    assert holder is found
    assert why in reason
