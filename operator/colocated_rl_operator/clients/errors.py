"""Name what can go wrong between the operator and its neighbours, and what the operator does then.

OperatorError
├─ BadSetting          whoever deployed it     -> exits at start with one line
├─ JobInvalid          whoever wrote the job   -> condition Stalled, reason InvalidSpec; looked at again on each change
├─ VolumeLost          whoever deleted it      -> condition Stalled, reason VolumeLost; no pod is made before it is back
├─ JobGone             nobody's                -> its loop ends, its pods are deleted
├─ ApiError            the API server's answer
│  ├─ ApiUnreachable   nobody's                -> this pass ends, later ones try again; members stay where they are.
│  │                                              answered so for half a minute: as Refused
│  ├─ Conflict         somebody wrote first    -> read again, plan again
│  ├─ NotFound         the object is gone      -> plan again without it
│  └─ Refused          a rule of the cluster   -> condition Stalled, reason ObjectRefused, with the server's words
├─ StaleEpoch          someone newer decides   -> this pass ends; goes on only after the Lease was renewed since
└─ ContractBroken      a bug, or an impostor   -> that member's connection ends; it counts as unknown
"""

from __future__ import annotations

from typing import TypeVar

Error = TypeVar("Error", bound=BaseException)

RETRY_S, MAX_RETRY_S = 1.0, 10.0


class OperatorError(Exception):
    """All errors have this base: the message states what was attempted, on what, and what happens next."""


class BadSetting(OperatorError):
    def __init__(self, name: str, value: str, expected: str) -> None:
        super().__init__(f"environment variable {name}={value!r}: expected {expected}")


class JobInvalid(OperatorError):
    """The spec breaks a rule that the API server can't check, or a newer operator wrote the record."""


class VolumeLost(OperatorError):
    """A claim of a job that has begun is gone, and what it held can't be made again."""


class JobGone(OperatorError):
    """The job no longer exists, whatever a watch reports."""


class ApiError(OperatorError):
    """The API server answered with an error, or not at all. `status` is its HTTP status; None: no answer."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status

    def again_s(self, *, failing_s: float) -> float:
        """Return the seconds until the next try: more the longer it fails (`failing_s`), but few without an answer.

        A server that is away comes back for all jobs at once, and devices may be idle until then.
        """
        return RETRY_S if self.status is None else min(max(RETRY_S, failing_s), MAX_RETRY_S)


class ApiUnreachable(ApiError):
    """The API server gave no answer, or a passing error (429, 5xx, expired token, a quota that two counted at once)."""


class Conflict(ApiError):
    """The object has another resourceVersion, or exists already."""


class NotFound(ApiError):
    """The object does not exist; `is_kind_known` is False if the API server does not serve its kind (no CRD yet)."""

    def __init__(self, message: str, status: int | None = None, *, is_kind_known: bool = True) -> None:
        super().__init__(message, status)
        self.is_kind_known = is_kind_known


class NotAdmitted(ApiError):
    """The cluster refused the object: quota, pod security, a webhook, a missing right, a name that is taken."""


class StaleEpoch(OperatorError):
    """The job's status or a member carries an epoch above ours."""


class ContractBroken(OperatorError):
    """A member sent a message that no member may send."""


def first(errors: BaseExceptionGroup[Error]) -> Error:
    """Return the first error of a group, or of groups in it: the one to report."""
    error = errors.exceptions[0]
    return first(error) if isinstance(error, BaseExceptionGroup) else error
