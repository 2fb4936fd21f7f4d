"""Errors end a command early, each with its exit code.

CliError
├─ UsageError           2  the command's arguments are wrong  -> the message names the argument
├─ NotReached           3  kubectl, the API server or a member gave no answer
├─ NotAllowed           3  the cluster's RBAC refuses  -> the message names the missing right
└─ ObjectMissing        3  no such job or pod, or no CRD
"""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes are part of the interface."""

    FINE = 0
    PROBLEM = 1  # an invalid manifest, a job that does not move
    USAGE = 2
    NO_ANSWER = 3  # whether there is a problem could not be found out
    INTERRUPTED = 130


class CliError(Exception):
    """The base class; a message states what was attempted, on what, and what to do next."""

    code = Exit.NO_ANSWER


class UsageError(CliError):
    """The command's arguments are wrong, or a file can't be read or written."""

    code = Exit.USAGE


class NotReached(CliError):
    """kubectl, the API server or a member gave no usable answer."""


class NotAllowed(CliError):
    """The API server refuses the request: nobody is logged in, or a right is missing."""


class ObjectMissing(CliError):
    """The API server or a member has no such object."""
