"""What can go wrong between the operator and its neighbours, and what the operator does then.

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
    """Base of all; the message says what was attempted, on what, and what happens next."""


class BadSetting(OperatorError):
    def __init__(self, name: str, value: str, expected: str) -> None:
        super().__init__(f"environment variable {name}={value!r}: expected {expected}")


class JobInvalid(OperatorError):
    """The spec breaks a rule that the API server could not see, or the record is in words of a newer operator."""


class VolumeLost(OperatorError):
    """A claim of a job that has begun is gone, and what it held can't be made again."""


class JobGone(OperatorError):
    """There is no such job any more, whatever a watch says."""


class ApiError(OperatorError):
    """An answer of the API server other than success. `status` is its HTTP status; None: no answer."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status

    def again_s(self, *, failing_s: float) -> float:
        """When to try again what has ended so for `failing_s`: later each time, but soon where nobody answers.

        A server that is away comes back for all, and devices may be idle until then.
        """
        return RETRY_S if self.status is None else min(max(RETRY_S, failing_s), MAX_RETRY_S)


class ApiUnreachable(ApiError):
    """No answer, or one that says "later" (429, 5xx, an expired token, a quota that two counted at once)."""


class Conflict(ApiError):
    """The object has another resourceVersion, or exists already."""


class NotFound(ApiError):
    """No such object; `is_kind_known` is False when the API server does not even serve that kind (no CRD yet)."""

    def __init__(self, message: str, status: int | None = None, *, is_kind_known: bool = True) -> None:
        super().__init__(message, status)
        self.is_kind_known = is_kind_known


class NotAdmitted(ApiError):
    """Not admitted: quota, pod security, a webhook, a missing right, a name that is taken."""


class StaleEpoch(OperatorError):
    """The job's status or a member carries an epoch above ours."""


class ContractBroken(OperatorError):
    """A member says what no member may say."""


def first(errors: BaseExceptionGroup[Error]) -> Error:
    """Of a group, and of groups in it: the one to tell of."""
    error = errors.exceptions[0]
    return first(error) if isinstance(error, BaseExceptionGroup) else error
