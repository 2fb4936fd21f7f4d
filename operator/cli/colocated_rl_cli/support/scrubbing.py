"""Remove secrets from what leaves the cluster in a support archive, rather too much than too little.

It removes values under a name like token, key or password; values of environment variables that are not known to be
harmless; anything that looks like a credential; and the copies that `kubectl apply` keeps in annotations. Last it
removes words that look as if they were drawn by chance. Digests and UIDs, which a reader needs, are in one case: what
is a secret and looks like them goes by its name alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

REMOVED = "[removed]"

_SECRET_NAME = re.compile(
    r"(?i)(pass(word|wd|phrase|code)|token|secret|credential|private|api[-_.]?key|access[-_.]?key|auth(?!or)|cookie)"
    r"|(?i:[\w-][-_.]key)$|[a-z]Key$|(?i:(^|[-_.])(sig(nature)?|pass|pwd)$)"
)
_HARMLESS_NAME = re.compile(
    r"(?i)tokens?(_?(per_?second|count|izer.*|limit))$|max.*tokens|.*_tokens$|tokens$|data_pass$|batch.*tokens|secretName$|topologyKey$"
)
_HARMLESS_ENV = re.compile(
    r"(COLOCATE|OMP|POD|NCCL|CUDA|TORCH|SGLANG|XDG)|HF_HOME$|HOME$|USER$|LOGNAME$|TMPDIR$|.*_(DIR|BASE)$"
)
_NOT_KEPT = {"managedFields", "kubectl.kubernetes.io/last-applied-configuration"}

_CREDENTIALS = (
    re.compile(r"-----BEGIN [A-Z ]+-----.*?(-----END [A-Z ]+-----|\Z)", re.DOTALL),
    re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"),  # a JSON web token
    re.compile(
        r"\b(hf|gh[oprsu]|github_pat|glpat|xox[abprs]|xapp|sk|pk|rk|AKIA|ASIA|AIza|npm|pypi|dckr_pat|dop_v1|gsk|hvs|nvapi"
        r"|r8|SG|shpat|whsec|ya29|ATATT|lin_api|dapi|GOCSPX)[-_.]?[A-Za-z0-9_-]{16,}[.\w-]*"
    ),
    re.compile(r"\bAGE-SECRET-KEY-\w+"),
    # user:password in an address, up to the next address, and the same where the address is a parameter of another
    re.compile(r"(?i)(?<=://)[^/\s:@\"']*(?::(?!//)[^\s\"'<>:]*)+(?=@(?!sha\d))"),
    re.compile(r"(?<=://)[^/\s:@\"']{12,200}(?=@)"),  # a token alone in its place
    re.compile(r"(?i)(?<=%3A%2F%2F)[^\s&\"'%]{0,200}%3A(?:(?!%40|%3A)[^\s&\"'])+(?=%40)"),
    re.compile(r"\blocal-[0-9a-f]{40}\b"),  # of a WandB server of one's own
)
_COLOURS = re.compile(r"(?i)(?:\x1b|\\u001b|\\x1b)\[[\d;]{0,20}m")  # they may stand between a name and its value
_NAMES = (
    r"pass(?:word|wd|phrase|code)|(?<![a-z])(?:pwd?|creds?|otp|pin|(?<!data_)pass(?![a-z])|auth(?=\\*[\"']))|token|secret"
    r"|credential|api[-_ ]?key|(?:access|private)[-_]?key|(?<=[a-z0-9_-])key(?:-data)?"
)
_HOOKS = re.compile(  # whoever knows the address of such a hook may write to the chat
    r"(?i)(https?:\\*/\\*/(?:hooks\.slack\.com\\*/|api\.telegram\.org\\*/bot|chat\.googleapis\.com\\*/"
    r"|oapi\.dingtalk\.com\\*/|[\w.-]{1,100}\.webhook\.office\.com\\*/|[\w.-]{1,100}\.logic\.azure\.com\\*/"
    r"|(?:(?!:\\*/\\*/)[^\s\"'<>]){1,200}?/(?:web)?hooks?\\*/))(?:[^\s\"'<>\\]|\\+/)+"
)
_QUERY = re.compile(
    rf"(?i)([?&](?:[\w.-]{{0,40}}[-_.])?(?:{_NAMES}|key|sig|signature|auth|jwt|pwd|code|sid)=)[^&\s\"'<>#\\]+"
)
_HEADER = re.compile(  # has several words: up to the end of its line, or of the quotation
    r"(?i)((?:cookie|authorization)\\*[\"']?\s*[:=,]\s*(?:(?<=,)\s*)?b?\\*[\"']?)(?!\[removed])[^\n\"'\\]+"
)
_BLOCK = re.compile(  # the lines of a block of YAML, which stand deeper than its name
    rf"(?im)^([ \t]{{0,80}}+)([^\n:]{{0,80}}?(?:{_NAMES})[\"']?[ \t]*:[ \t]*(?:!!\w+[ \t]+)?[|>][-+\d]{{0,2}}[ \t]*\n)"
    r"((?:\1[ \t][^\n]*(?:\n|\Z)|[ \t]*\n)+)"
)
_QUOTED_BLOCK = re.compile(  # the same in a string of a log, to its end
    rf"(?i)((?:{_NAMES})\\*[\"']?[ \t]*:[ \t]*[|>][-+\d]{{0,2}}[ \t]*\\+n)[^\n\"]+"
)
# No pattern begins with a repetition without a bound, nor runs on past the next place where it could begin: either
# would take quadratic time over a long word. Backslashes occur where one text is quoted inside another.
_NO_NAME = r"(?![\w.\"'-]{1,80}[ \t]*(?::\s|=[^=\s]))"  # a value may stand in the next line, and a next name does too
_NAMED = re.compile(
    rf"(?i)((?:(?:{_NAMES})s?|cookies)\\*[\"']?\s*(?:[=:]>?|->)(?:[ \t]*+(?!\n)|\s*+{_NO_NAME})(?:bearer\s+|basic\s+)?)"
    r"(\[(?!removed])[^\[\]\n]*\]|\\+\"[^\"\n]*\"|\\+'[^'\n]*'|\"\"\"[^\"]*\"\"\"|[bru]?\"(?:[^\"\\\n]|\\.)*\"|[bru]?'(?:[^'\\\n]|\\.)*'|[^\s,;}\"'&]+)"
)
_FLAG = re.compile(
    rf"(?i)((?<![\w-])--[\w-]{{0,64}}(?:{_NAMES})(?!i[sz]er)[\w-]*\s+)(\"[^\"\n]*\"|'[^'\n]*'|[^\s\"'-][^\s\"']*)"
)
_LOGIN = re.compile(  # of .netrc, and of curl
    r"(?i)(\blogin\s+\S{1,200}\s+password\s+|(?<!\S)(?:-u|--user)[\s=]+[^\s:\"']{1,200}:)[^\s\"']+"
)
_ITEM = re.compile(  # of a pair or a command line: a name in quotes, a comma, and its value
    rf"(?i)([\"'](?:--)?[\w-]{{0,64}}(?:{_NAMES})\\*[\"']\s*,\s*[bru]?\\*[\"'])[^\"'\n\\]+"
)
_PAIR = re.compile(  # of name and value, as variables of containers and fields of forms have them
    rf"(?i)((?<![a-z])name\\*[\"']?\s*[:=]\s*\\*[\"']?[\w.-]{{0,64}}(?:{_NAMES})[\w-]{{0,32}}\\*[\"']?[\s,]+\\*[\"']?value"
    r"\\*[\"']?\s*[:=]\s*\\*[\"']?)[^\n\"'\\]+"
)
_ELEMENT = re.compile(rf"(?i)(<[\w:.-]{{0,64}}(?:{_NAMES})>)[^<]+")
_LISTED = re.compile(  # the items of a list of YAML
    rf"(?im)^([ \t]{{0,80}}+)([^\n:]{{0,80}}?(?:{_NAMES})s?[\"']?[ \t]*:[ \t]*\n)((?:\1[ \t]*-[ \t][^\n]*(?:\n|\Z))+)"
)
_SPOKEN = re.compile(  # a name and a word of letters and figures: `password hunter2`, `the password is hunter2`
    r"(?i)((?:pass(?:word|wd|phrase|code)|secret|credential|api[-_ ]?key|(?:access|private)[-_]key)"
    r"\s+(?:(?:is|was)\s+)?)(?=[^\s\"']{0,200}[a-z])(?=[^\s\"']{0,200}\d)[^\s\"':=]{6,}"
)
_SHORT_FLAG = re.compile(  # of programs that take a password by it
    r"(?i)(\b(?:sshpass|mysql\w*|mariadb\w*|login)\b[^\n]{0,200}?\s-p[ \t]*)[^\s\"']+"
)
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}")


_WORD = re.compile(r"[A-Za-z0-9+/_-]{24,}=*")
_DIGESTS = ("sha256:", "SHA256:", "sha512:", "sha1:")
CHANGES_OF_CHANCE = 1 / 3  # per character; two of three in a word of letters and figures that chance has drawn


def scrub_text(text: str) -> str:
    """Return a text with everything that looks like a secret replaced."""
    text = _COLOURS.sub("", text)
    for pattern in _CREDENTIALS:
        text = pattern.sub(REMOVED, text)
    text = _BEARER.sub(rf"\1 {REMOVED}", text)
    text = _BLOCK.sub(rf"\1\2\1  {REMOVED}\n", text)
    text = _LISTED.sub(rf"\1\2\1  {REMOVED}\n", text)
    for pattern in (_QUOTED_BLOCK, _HOOKS, _QUERY, _HEADER, _LOGIN, _PAIR, _ITEM, _ELEMENT, _SPOKEN, _SHORT_FLAG):
        text = pattern.sub(rf"\1{REMOVED}", text)
    return _WORD.sub(_keep_words, _FLAG.sub(_keep_figures, _NAMED.sub(_keep_figures, text)))


def _keep_figures(match: re.Match[str]) -> str:
    """Keep truth values, nulls and counts of tokens: `token: 12` is one, and `password: 12` is a password."""
    name, value = match[1], match[2]
    figures = r"null|true|false|None" + (r"|[\d.]+" if "token" in name.lower() else "")
    return match[0] if re.fullmatch(figures, value) or value == REMOVED else f"{name}{REMOVED}"


def _keep_words(match: re.Match[str]) -> str:
    """Keep what people write, and digests: these change between cases and figures less often than chance does."""
    word = match[0]
    if match.string.endswith(_DIGESTS, 0, match.start()) or word.lower().startswith("sha"):
        return word
    kinds = ["u" if each.isupper() else "l" if each.islower() else "d" if each.isdigit() else "" for each in word]
    changes = sum(one != other and bool(one and other) for one, other in pairwise(kinds))
    is_drawn = kinds.count("d") >= 2 and {"u", "l"} <= {*kinds} and changes >= len(word) * CHANGES_OF_CHANCE
    return REMOVED if is_drawn else word


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
    if (
        _is_secret(key)
        and isinstance(value, int | float)
        and not isinstance(value, bool)
        and "token" not in key.lower()
    ):
        return REMOVED
    if _is_secret(key) and isinstance(value, list):
        return [_member(key, item) for item in value]
    return scrub(value)


def _is_secret(name: str) -> bool:
    return bool(_SECRET_NAME.search(name)) and not _HARMLESS_NAME.search(name)


def _words(values: list[Any]) -> list[Any]:
    """Scrub the items of a list; in a command line, also the word after a flag such as --api-key."""
    kept, before, follows = [], "", False
    for value in values:
        is_flag = isinstance(value, str) and value.startswith("-") and _is_secret(value)
        if follows and isinstance(value, str) and not value.startswith("-"):
            kept.append(REMOVED)
        elif is_flag and "=" in value:
            kept.append(f"{value.split('=', 1)[0]}={REMOVED}")
        elif isinstance(value, str) and _LOGIN.fullmatch(f"{before} {value}"):
            kept.append(f"{value.split(':', 1)[0]}:{REMOVED}")
        else:
            kept.append(scrub(value))
        before, follows = value, is_flag and "=" not in value
    return kept
