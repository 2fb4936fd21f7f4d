"""Run the operator process: as a candidate first, then as the leader until it ends.

A standby serves its probes and does not start kopf. An orderly end sends nothing more, closes the connections and
releases the Lease; members stay where they are, and the next leader hears from them.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import NoReturn

import kopf
import uvloop
from prometheus_client import REGISTRY

from colocated_rl_api import descriptors, garbage, logs, names
from colocated_rl_operator import handlers
from colocated_rl_operator.clients.authority import Keyring, find_keyring
from colocated_rl_operator.clients.cluster import ClusterAccess, find_cluster
from colocated_rl_operator.clients.errors import ApiError, BadSetting, NotFound
from colocated_rl_operator.clients.events import Events
from colocated_rl_operator.clients.kube import Kube
from colocated_rl_operator.clients.lease import Lease, LeaseTerms
from colocated_rl_operator.clients.members import Members
from colocated_rl_operator.loop.doors import Doors
from colocated_rl_operator.loop.drive import OperatorContext
from colocated_rl_operator.loop.keys import keep_keys
from colocated_rl_operator.loop.nodes import Nodes
from colocated_rl_operator.loop.pods import Pods
from colocated_rl_operator.loop.wakeups import Wakeups
from colocated_rl_operator.metrics import OperatorMetrics
from colocated_rl_operator.probes import Probes
from colocated_rl_operator.settings import OperatorSettings
from colocated_rl_operator.watches import keep_watching

LOG = logging.getLogger("colocated_rl_operator")

START_RETRY_S = 2.0
MADE_BEFORE_GC = 100_000  # objects: five times a thousand members' reports at one rung

run = uvloop.run  # asyncio's TLS takes five times the memory for each member


def main() -> int:
    try:
        settings, access = OperatorSettings.read(os.environ), find_cluster(os.environ)
    except BadSetting as error:
        print(f"colocated-rl operator: {error}", file=sys.stderr)  # noqa: T201 - before there are logs
        return 2
    logs.configure(level=settings.log_level, role="operator", pod=settings.identity, quotes=True)
    descriptors.raise_limit()
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)  # else a line for each watch event
    garbage.look_seldom(MADE_BEFORE_GC)
    try:
        run(serve(settings, access))
    except asyncio.CancelledError:
        logs.log(LOG, "candidacy ended")
    return 0


async def serve(settings: OperatorSettings, access: ClusterAccess) -> None:
    metrics = OperatorMetrics(REGISTRY)
    terms = LeaseTerms(
        namespace=settings.namespace,
        name=settings.lease_name,
        identity=settings.identity,
        duration_s=settings.lease.duration_s,
        renew_deadline_s=settings.lease.renew_deadline_s,
        retry_s=settings.lease.retry_s,
    )
    lease = Lease(terms, connect=lambda: Kube(access), die=_die)
    async with Probes(metrics, lease, port=settings.metrics_port):
        await _become_leader(lease)
        beating = asyncio.create_task(lease.keep_beating(), name="lease/heartbeat")
        try:
            await lead(settings, access, metrics, lease)
        finally:
            await lease.release()
            beating.cancel()


async def lead(settings: OperatorSettings, access: ClusterAccess, metrics: OperatorMetrics, lease: Lease) -> None:
    wakeups = Wakeups()
    async with Kube(access, count=metrics.count_request) as kube:
        await _until_jobs_are_served(kube, settings.watch_namespaces or (settings.namespace,))
        keyring = await _until_keyring_is_found(kube, settings)
        metrics.leader.set(1)
        async with Members(
            keyring.operator_context(), wakeups.wake, lost=metrics.lost.inc, renewals=keyring
        ) as members:
            metrics.connected.set_function(lambda: members.connected)
            _show_keys(metrics, keyring, members)
            doors = Doors(
                kube=kube,
                members=members,
                events=Events(kube, instance=settings.identity),
                pods=Pods(),
                keyring=keyring,
                egress=settings.egress,
                images=settings.images,
                metrics=metrics,
                namespace=settings.namespace,
                release=settings.release,
                takes_over=settings.takes_over,
                version=version("colocated-rl"),
                nodes=Nodes(settings.node_signs),
                taints_nodes=settings.taints_nodes,
                users_of_namespaces=settings.users_of_namespaces,
                confirm=lease.confirm,
            )
            context = OperatorContext(access, doors, wakeups)
            keep_watching()
            if settings.node_signs:
                handlers.watch_nodes()
            keeping = asyncio.create_task(
                keep_keys(
                    kube,
                    settings.namespace,
                    keyring,
                    members,
                    every_s=settings.keys_check_s,
                    issued=settings.issued_authority,
                ),
                name="keys",
            )
            keeping.add_done_callback(_end_with)
            os.environ["POD_ID"] = settings.identity  # else kopf asks for the name of its user, and the UID has none
            try:
                await kopf.operator(
                    standalone=True,  # the Lease elects; peering does not fence
                    clusterwide=not settings.watch_namespaces,
                    namespaces=settings.watch_namespaces,
                    memo=kopf.Memo(context=context),
                )
            finally:
                keeping.cancel()
                context.close()
    logs.log(LOG, "leadership ended")


async def _until_jobs_are_served(kube: Kube, namespaces: Sequence[str]) -> None:
    """Wait for the CRD: kopf looks once for what to watch, and without the CRD would watch nothing for ever.

    One namespace may be gone, or its people have taken away the operator's rights there: any other one shows it too.
    """
    for namespace in itertools.cycle(namespaces):
        try:
            await kube.read_job(namespace, "is-the-crd-there")
        except NotFound as error:
            if error.is_kind_known:
                return
            logs.log(LOG, "CRD not found, trying again", logging.WARNING, reason=str(error))
        except ApiError as error:
            logs.log(LOG, "jobs not read, trying again", logging.WARNING, reason=str(error))
        else:
            return
        await asyncio.sleep(START_RETRY_S)


async def _until_keyring_is_found(kube: Kube, settings: OperatorSettings) -> Keyring:
    """Return the keyring once it is found: a leader that ended instead would only fail again, and then back off."""
    while True:
        try:
            keyring = await find_keyring(kube, settings.namespace, settings.issued_authority)
            ends = keyring.authority.certificate.not_valid_after_utc
            logs.log(LOG, "authority found", reason=f"it is valid until {ends:%Y-%m-%d}")
            return keyring
        except ApiError as error:
            logs.log(LOG, "authority not read, trying again", logging.ERROR, reason=str(error))
        await asyncio.sleep(START_RETRY_S)


def _end_with(keeping: asyncio.Task[NoReturn]) -> None:
    """End the process if nothing renews keys any more: another one does."""
    if not keeping.cancelled():
        _die(f"keys are no longer renewed: {keeping.exception()!r}")


def _show_keys(metrics: OperatorMetrics, keyring: Keyring, members: Members) -> None:
    def first_end() -> float:
        return math.nan if members.first_end is None else members.first_end.timestamp()

    expiry = metrics.certificate_expiry
    expiry.labels("authority").set_function(lambda: keyring.authority.expires.timestamp())
    expiry.labels("members").set_function(first_end)
    metrics.outdated.set_function(lambda: members.outdated)


async def _become_leader(lease: Lease) -> None:
    """Acquire the lease. Until then SIGTERM ends the process at once; afterwards kopf handles the signals."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    logs.log(LOG, "lease awaited", finalizer=names.FINALIZER)
    try:
        await lease.acquire()
    except asyncio.CancelledError:
        await lease.release()
        raise


def _die(reason: str) -> NoReturn:
    """End the process without clean-up: a leader past its deadline must not send another byte."""
    logs.log(LOG, "process aborted", logging.CRITICAL, reason=reason)
    sys.stdout.flush()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
