"""Fetch files of a dataset from the Hugging Face hub, in the container where rewards are computed.

Datasets must be public: reward code could read the token of a private one. Put those on a volume and name them as a
file. Of all that a hub calls a dataset, this reads files in JSON lines, Parquet and Arrow; the dataset's card, or
else their names, decide which of them make a split.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from colocated_rl_api.prompts import FILE_ENDINGS, HuggingFace
from colocated_rl_rollout.hub_calls import HubFailed, call
from colocated_rl_rollout.tasks.rows import RowsUnusable

SPLITS = ("training", "validation", "valid", "val", "dev", "test", "testing", "eval", "evaluation")  # of `datasets`
PATIENCE_S = 600.0  # below the deadline of a process's start


def fetch(source: HuggingFace, *, cache: Path, patience_s: float = PATIENCE_S) -> list[Path]:
    """Return the files of the split, as they were first fetched into this cache. Raises RowsUnusable.

    A process that takes the place of another one needs the same rows, and no hub: that may be away by then, and a
    branch may have moved on. patience_s: how long to retry a hub that does not answer.
    """
    asked = json.dumps([source.endpoint, source.name, source.revision, source.config, source.split])
    fetched = cache / f"{hashlib.sha256(asked.encode()).hexdigest()[:32]}.fetched"
    if fetched.exists():
        return [Path(path) for path in json.loads(fetched.read_text())]
    try:
        found = call(lambda: _download(source, cache), patience_s=patience_s)
    except HubFailed as error:
        what = f"{source.name} at {source.revision} can't be fetched from {source.endpoint}"
        raise RowsUnusable(f"{what}: {error}") from error
    unfinished = fetched.with_suffix(f".{os.getpid()}")  # several processes start at once
    unfinished.write_text(json.dumps([str(path) for path in found]))
    unfinished.replace(fetched)
    return found


def _download(source: HuggingFace, cache: Path) -> list[Path]:
    import huggingface_hub

    hub = huggingface_hub.HfApi(endpoint=source.endpoint, token=False)
    found = hub.dataset_info(source.name, revision=source.revision)
    names = [sibling.rfilename for sibling in found.siblings or ()]
    configs = (found.card_data.get("configs") if found.card_data else None) or ()
    return [
        Path(hub.hf_hub_download(source.name, name, repo_type="dataset", revision=found.sha, cache_dir=cache))
        for name in files_of(source, names, configs)
    ]


def files_of(source: HuggingFace, names: Sequence[str], configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the files that make a split, among the names of all. configs: those of the dataset's card.

    Raises RowsUnusable, whose message lists what there is instead.
    """
    config = _config(source, configs) if configs else {"data_dir": source.config}
    folder = "".join(f"{part}/" for part in PurePosixPath(config.get("data_dir") or "").parts)
    within = {name.removeprefix(folder): name for name in names if name.startswith(folder)}
    if files := config.get("data_files"):
        patterns = _patterns(files, source.split)
        found = [name for inner, name in within.items() if any(_matches(inner, pattern) for pattern in patterns)]
    else:
        found = [within[inner] for inner in _called(source.split, [each for each in within if _is_data(each)])]
    if not found:
        there = ", ".join(filter(_is_data, names)) or f"none that ends with {', '.join(FILE_ENDINGS)}"
        raise RowsUnusable(f"no file of {source.name} belongs to split {source.split!r}; its data files: {there}")
    return sorted(found)


def _config(source: HuggingFace, configs: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the configuration of the card that the job names. Raises RowsUnusable."""
    named = {str(config.get("config_name", "default")): config for config in configs}
    default = next((name for name, config in named.items() if config.get("default")), "default")
    config = named.get(source.config or default) or (next(iter(named.values())) if len(named) == 1 else None)
    if config is None or (source.config and source.config not in named):
        raise RowsUnusable(f"{source.name} has several configs: set config to one of {', '.join(named)}")
    return config


def _patterns(files: Any, wanted: str) -> list[str]:
    """Return the card's patterns for the split's files, from one pattern, several, or several for each split."""
    found: list[str] = []
    for each in [files] if isinstance(files, str) else files:
        split, path = (each.get("split", "train"), each["path"]) if isinstance(each, Mapping) else ("train", each)
        if split == wanted:
            found += [path] if isinstance(path, str) else path
    return found


def _called(split: str, names: Sequence[str]) -> list[str]:
    """Return the files named after the split. Where none is named after any, all are of `train`, as in `datasets`."""
    found = [name for name in names if _names(name, split)]
    if found or split != "train" or any(_names(name, word) for name in names for word in SPLITS):
        return found
    return list(names)


def _matches(name: str, pattern: str) -> bool:
    """Return whether a name matches: `*` stays within a folder, `**` goes below."""
    parts = {"**/": "(.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    expression = "".join(parts.get(piece, re.escape(piece)) for piece in re.split(r"(\*\*/|\*\*|\*|\?)", pattern))
    return re.fullmatch(expression, name) is not None


def _is_data(name: str) -> bool:
    return name.endswith(FILE_ENDINGS)


def _names(name: str, split: str) -> bool:
    """Return whether a folder or file is named after a split: data/train-00000-of-00001.parquet, train.jsonl."""
    return re.search(rf"(^|[/._ -]){re.escape(split)}([/._ -]|$)", name) is not None
