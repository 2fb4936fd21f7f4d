"""Register the handlers that kopf calls. One daemon drives each job; watch events only wake it.

kopf watches jobs and pods, keeps its finalizer on jobs while their daemon runs, and stops daemons on deletion and exit.
The operator uses nothing else of it: no indexes, retries, status, events or peering (see the notes at each setting).
"""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime, timedelta
from typing import Any

import kopf

from colocated_rl_api import names
from colocated_rl_operator.clients.cluster import ClusterAccess
from colocated_rl_operator.loop.drive import drive_job, note_job, note_node, note_pod, release_orphan

OURS = {names.MANAGED_BY_LABEL: names.MANAGED_BY}
DISMISS_S = 15.0  # a daemon has this long to end by itself, on deletion and on exit; then it is cancelled
CANCEL_S = 5.0
LOGIN_RETRY_S = 1.0
CONNECTION_LIFE = timedelta(days=3650)


class NoDiffs(kopf.DiffBaseStorage):
    """Store no diffs: no handler asks what changed, and kopf would copy each object of each event to find out."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        return None


@kopf.on.startup()
async def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
    settings.persistence.finalizer = names.FINALIZER
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=names.GROUP)
    settings.persistence.diffbase_storage = NoDiffs()
    settings.posting.enabled = False  # else it makes an Event object for each log line
    settings.scanning.disabled = True  # else it lists namespaces and CRDs; __main__ has waited for ours
    # else kopf watches every pod
    settings.watching.label_selectors["pods"] = f"{names.MANAGED_BY_LABEL}={names.MANAGED_BY}"
    # objects of a list at once: a job can be 1.5 MB long, and 6 MB as a text; a pod twice as long
    settings.watching.chunk_size = 10
    settings.watching.connect_timeout = 10
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 310
    settings.networking.request_timeout = 20
    # kopf waits for the daemon where it handles the deletion, and drops the finalizer there: a back-off of the daemon's
    # would be waited out whole whenever the daemon's last write is handled before the daemon has ended
    settings.background.instant_exit_timeout = DISMISS_S
    settings.process.ultimate_exiting_timeout = DISMISS_S + CANCEL_S + 5
    logging.getLogger("kopf").setLevel(logging.WARNING)  # else it logs a line for each watch event


@kopf.on.login()
async def login(memo: Any, **_: Any) -> kopf.ConnectionInfo:
    context = memo.context
    if context.has_logged_in:
        await asyncio.sleep(LOGIN_RETRY_S)
    context.has_logged_in = True
    return connection(context.access)


def is_ours(spec: Any, **_: Any) -> bool:
    """Return whether the job is ours: others get no daemon, and so no finalizer. The field never changes."""
    return bool(spec.get("managedBy", names.OPERATOR) == names.OPERATOR)


@kopf.daemon(names.GROUP, names.VERSION, names.PLURAL, when=is_ours, cancellation_timeout=CANCEL_S, backoff=1)
async def drive(body: kopf.Body, stopped: Any, memo: Any, **_: Any) -> None:
    def was_deleted() -> bool:
        return kopf.DaemonStoppingReason.RESOURCE_DELETED in stopped.reason

    await drive_job(body, stopped, memo.context, was_deleted=was_deleted)


@kopf.on.event(names.GROUP, names.VERSION, names.PLURAL, when=is_ours)
async def on_job_event(event: kopf.RawEvent, memo: Any, **_: Any) -> None:
    note_job(event, memo.context)
    await release_orphan(event, memo.context)


@kopf.on.event("pods", labels=OURS)
async def on_pod_event(event: kopf.RawEvent, memo: Any, **_: Any) -> None:
    note_pod(event, memo.context)


async def on_node_event(event: kopf.RawEvent, memo: Any, **_: Any) -> None:
    note_node(event, memo.context)


def watch_nodes() -> None:
    """Have kopf watch nodes too, which takes a right that not every operator has."""
    kopf.on.event("", "v1", "nodes")(on_node_event)


def connection(access: ClusterAccess) -> kopf.ConnectionInfo:
    """Return kopf's connection to the same API server. The next login, after the first 401, takes a rotated token.

    A token that was not rotated is returned again, because a 401 may pass, and a broken TLS connection counts as one.
    kopf ends when a login returns a connection that failed before, so no two of these are equal.
    """
    return kopf.ConnectionInfo(
        expiration=datetime.now(UTC) + CONNECTION_LIFE,
        server=access.server,
        ca_data=access.ca_pem,
        token=access.token(),
        certificate_data=access.certificate_pem,
        private_key_data=access.certificate_pem,
    )
