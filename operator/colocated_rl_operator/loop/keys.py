"""Renew what the operator and its members authenticate with, for as long as the operator leads.

An authority that somebody else issues is followed in steps: everybody trusts it beside the present one, then it signs,
then the former one is trusted no more. Each step is a write of the operator's own Secret, so that whoever leads next
goes on from there. Between two steps no connected member may lack the newest keys, and SETTLED_CHECKS pass: pods of a
reference are made again meanwhile, and clients in other pods get their Secret.
"""

from __future__ import annotations

import asyncio
import logging
from typing import NoReturn

from colocated_rl_api.logs import log
from colocated_rl_operator.clients.authority import (
    RENEWED_BEFORE,
    Authority,
    Keyring,
    SecretApi,
    read_again,
    read_issued,
    write_authority,
)
from colocated_rl_operator.clients.errors import ApiError
from colocated_rl_operator.clients.members import Members

LOG = logging.getLogger(__name__)


SETTLED_CHECKS = 10  # ten minutes as a rule


async def keep_keys(
    api: SecretApi, namespace: str, keyring: Keyring, members: Members, *, every_s: float, issued: str = ""
) -> NoReturn:
    """Send members new keys in time, and take other Secrets that somebody has put in the place of ours.

    Without the Secrets, or with damaged ones, it goes on by the keys that it has. issued: the Secret whose authority
    is followed; "": none.
    """
    made_at, settled = keyring.now(), 0
    while True:
        await asyncio.sleep(every_s)
        is_other = False
        settled = 0 if members.outdated else settled + 1
        if issued and settled > SETTLED_CHECKS:
            await _follow(api, namespace, issued, keyring.authority)
        try:
            is_other = await read_again(api, namespace, keyring)
        except ApiError as error:
            log(LOG, "authority not read, trying again", logging.ERROR, reason=str(error))
        if is_other:
            settled = 0
            log(LOG, "authority changed", reason="its Secret or that of the tokens has: members get new keys")
        if is_other or not made_at <= keyring.now() < made_at + RENEWED_BEFORE:  # before: the clock was ahead
            members.tls, made_at = keyring.operator_context(), keyring.now()
        await members.renew()
        if is_other:
            members.wake_all()


async def _follow(api: SecretApi, namespace: str, name: str, present: Authority) -> None:
    """Go one step towards the authority that somebody else issues, if any is left."""
    try:
        issued = await read_issued(api, namespace, name)
        if (nearer := next_step(present, issued)) is not None:
            await write_authority(api, namespace, nearer)
    except ApiError as error:
        log(LOG, "issued authority not followed, trying again", logging.ERROR, reason=str(error))


def next_step(present: Authority, issued: Authority) -> Authority | None:
    """Return the authority by which the present one gets nearer to the issued one; None if it is there."""
    if present.certificate == issued.certificate:
        return issued if present.others else None
    if issued.certificate in present.others:
        return Authority(issued.key, issued.certificate, (present.certificate,))
    return Authority(present.key, present.certificate, (issued.certificate,))
