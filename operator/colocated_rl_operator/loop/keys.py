"""Renew what the operator and its members authenticate with, for as long as the operator leads."""

from __future__ import annotations

import asyncio
import logging
from typing import NoReturn

from colocated_rl_api.logs import log
from colocated_rl_operator.clients.authority import RENEWED_BEFORE, Keyring, SecretApi, read_again
from colocated_rl_operator.clients.errors import ApiError
from colocated_rl_operator.clients.members import Members

LOG = logging.getLogger(__name__)


async def keep_keys(api: SecretApi, namespace: str, keyring: Keyring, members: Members, *, every_s: float) -> NoReturn:
    """Send members new keys in time, and take other Secrets that somebody has put in the place of ours.

    Without the Secrets, or with damaged ones, it goes on by the keys that it has.
    """
    until = keyring.now() + RENEWED_BEFORE
    while True:
        await asyncio.sleep(every_s)
        is_other = False
        try:
            is_other = await read_again(api, namespace, keyring)
        except ApiError as error:
            log(LOG, "authority not read, trying again", logging.ERROR, reason=str(error))
        if is_other:
            log(LOG, "authority changed", reason="its Secret or that of the tokens has: members get new keys")
        if is_other or keyring.now() >= until:
            members.tls, until = keyring.operator_context(), keyring.now() + RENEWED_BEFORE
        await members.renew()
        if is_other:
            members.wake_all()
