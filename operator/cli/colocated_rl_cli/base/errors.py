"""What ends a command early, and with which exit code.

CliError
├─ UsageError           2  the words of the command   -> says which
├─ NotReached           3  kubectl, the API server or a member gave no answer
├─ NotAllowed           3  the cluster's RBAC says no  -> names the right that is missing
└─ NotThere             3  no such job or pod, or no CRD
"""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes; part of the interface."""

    FINE = 0
    PROBLEM = 1  # what was asked about is not as it should be: an invalid manifest, a job that does not move
    USAGE = 2
    NO_ANSWER = 3  # it could not be found out
    INTERRUPTED = 130


class CliError(Exception):
    """Base of all; the message says what was attempted, on what, and what to do next."""

    code = Exit.NO_ANSWER


class UsageError(CliError):
    code = Exit.USAGE


class NotReached(CliError):
    """Nobody answered, or nobody who could know."""


class NotAllowed(CliError):
    """The API server knows who asks, and refuses."""


class ObjectMissing(CliError):
    """The API server has no such object."""
