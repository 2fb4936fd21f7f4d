"""Remove secrets from what leaves the cluster in a support archive, rather too much than too little.

It removes values under a name like token, key or password; values of environment variables that are not known to be
harmless; anything that looks like a credential; and the copies that `kubectl apply` keeps in annotations.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

REMOVED = "[removed]"

_SECRET_NAME = re.compile(
    r"(?i)(pass(word|wd|phrase)|token|secret|credential|private|api[-_.]?key|access[-_.]?key|auth(?!or))"
)
_HARMLESS_NAME = re.compile(
    r"(?i)tokens?(_?(per_?second|count|izer.*|limit))$|max.*tokens|.*_tokens$|tokens$|batch.*tokens|secretName$"
)
_HARMLESS_ENV = re.compile(
    r"(COLOCATE|OMP|POD|NCCL|CUDA|TORCH|SGLANG|XDG)|HF_HOME$|HOME$|USER$|LOGNAME$|TMPDIR$|.*_(DIR|BASE)$"
)
_NOT_KEPT = {"managedFields", "kubectl.kubernetes.io/last-applied-configuration"}

_CREDENTIALS = (
    re.compile(r"-----BEGIN [A-Z ]+-----.*?(-----END [A-Z ]+-----|\Z)", re.DOTALL),
    re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"),  # a JSON web token
    re.compile(r"\b(hf|gh[oprsu]|github_pat|glpat|xox[abprs]|sk|pk|rk|AKIA|ASIA|AIza|npm|pypi)[-_]?[A-Za-z0-9_-]{16,}"),
    re.compile(r"(?i)(?<=://)[^/\s:@\"']*:[^/\s@\"']+(?=@)"),  # user:password in an address
)
_NAMES = r"pass(?:word|wd|phrase)|token|secret|credential|api[-_ ]?key|(?:access|private)[-_]?key|authorization"
# No pattern begins with a repetition, which would take quadratic time over a long word. Backslashes occur where one
# text is quoted inside another.
_NAMED = re.compile(
    rf"(?i)((?:{_NAMES})\\*[\"']?\s*[=:]\s*(?:bearer\s+|basic\s+)?)"
    r"(\\*\"[^\"\n]*\"|\\*'[^'\n]*'|[^\s,;}\"'&]+)"
)
_FLAG = re.compile(
    rf"(?i)((?<![\w-])--[\w-]{{0,64}}(?:{_NAMES})(?!i[sz]er)[\w-]*\s+)(\"[^\"\n]*\"|'[^'\n]*'|[^\s\"'-][^\s\"']*)"
)
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}")


def scrub_text(text: str) -> str:
    """Return a text with everything that looks like a secret replaced."""
    for pattern in _CREDENTIALS:
        text = pattern.sub(REMOVED, text)
    text = _BEARER.sub(rf"\1 {REMOVED}", text)
    return _FLAG.sub(_keep_figures, _NAMED.sub(_keep_figures, text))


def _keep_figures(match: re.Match[str]) -> str:
    """Keep numbers, truth values and nulls: `tokens: 12` is a count."""
    name, value = match[1], match[2]
    is_figure = re.fullmatch(r"[\d.]+|null|true|false|None", value) is not None
    return match[0] if is_figure else f"{name}{REMOVED}"


def scrub(value: Any) -> Any:
    """Return plain data with its secrets replaced."""
    if isinstance(value, Mapping):
        if set(value) >= {"name", "value"} and isinstance(value["value"], str):  # an environment variable
            kept = _HARMLESS_ENV.match(str(value["name"])) and not _is_secret(str(value["name"]))
            return {**value, "value": scrub_text(value["value"]) if kept else REMOVED}
        return {key: _member(str(key), part) for key, part in value.items() if key not in _NOT_KEPT}
    if isinstance(value, list):
        return _words(value)
    return scrub_text(value) if isinstance(value, str) else value


def _member(key: str, value: Any) -> Any:
    if _is_secret(key) and isinstance(value, str | bytes) and value:
        return REMOVED
    if _is_secret(key) and isinstance(value, list):
        return [_member(key, item) for item in value]
    return scrub(value)


def _is_secret(name: str) -> bool:
    return bool(_SECRET_NAME.search(name)) and not _HARMLESS_NAME.search(name)


def _words(values: list[Any]) -> list[Any]:
    """Scrub the items of a list; in a command line, also the word after a flag such as --api-key."""
    kept, follows = [], False
    for value in values:
        is_flag = isinstance(value, str) and value.startswith("-") and _is_secret(value)
        if follows and isinstance(value, str) and not value.startswith("-"):
            kept.append(REMOVED)
        elif is_flag and "=" in value:
            kept.append(f"{value.split('=', 1)[0]}={REMOVED}")
        else:
            kept.append(scrub(value))
        follows = is_flag and "=" not in value
    return kept
