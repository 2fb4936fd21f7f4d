"""Fetch a job's model from the Hugging Face hub into the volume that all containers of a pod read it from.

Run as `python -m colocated_rl_rollout.fetch_model` by a container that ends before the others start. Each file is
compared with the hub's own hash of it (SHA-256, or Git's for small files) before the directory counts as complete, so
that no container ever reads a torn model, nor one that is only partly there. Pods with one volume, a claim or a
directory of their node, fetch one after the other: the library would remove a file that another process has just
fetched, and fetch it again.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from colocated_rl_api import durable, logs, names
from colocated_rl_api.member_wire import JobFile
from colocated_rl_api.model import HubModel
from colocated_rl_rollout.hub_calls import HubFailed, call

COMPLETE = ".complete"  # written last
LOCK = ".cache/fetch.lock"  # beside what the library keeps
FILES = ("*.safetensors", "*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja")  # no code, and no second format
FOLDERS = ("original/*", "onnx/*", "*/*.safetensors")  # what many models hold once more
PATIENCE_S = 1800.0  # then the container ends with a message, and the kubelet starts it again

LOG = logging.getLogger(__name__)


class ModelNotFetched(Exception):
    """The model can't be fetched, or isn't what the hub says it is. The message is for people."""


def fetch(source: HubModel, *, models: Path, token: str | None, patience_s: float = PATIENCE_S) -> bool:
    """Fetch the model to `models / source.path`. Return whether it was not there yet.

    token: of a private model. patience_s: how long to retry a hub that does not answer. Raises ModelNotFetched.
    """
    place = models / source.path
    if (place / COMPLETE).exists():
        return False
    with ExitStack() as alone:
        try:
            call(lambda: alone.enter_context(_lock(place, patience_s)), patience_s=patience_s)
        except HubFailed as error:
            raise ModelNotFetched(
                f"{models} can't be had to fetch {source.name} into it: {error}. It has to be writable for user "
                f"{os.getuid()} or one of its groups, and no other pod may take {patience_s:.0f} s for the same model"
            ) from error
        if (place / COMPLETE).exists():
            return False
        try:
            damaged = call(lambda: _download(source, place, token), patience_s=patience_s)
        except HubFailed as error:
            what = f"model {source.name} at {source.revision} can't be fetched from {source.endpoint}"
            hint = "" if token else "; a private or gated model needs secretName"
            raise ModelNotFetched(f"{what}: {error}{hint}") from error
        _complete(source, place, damaged)
    return True


def _lock(place: Path, patience_s: float) -> AbstractContextManager[object]:
    """Return a lock that a killed process holds no longer. Entering raises OSError after `patience_s`.

    On a volume without such locks its file stays after a kill, and somebody has to remove it.
    """
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined] # public, and imported there lazily

    lock = place / LOCK
    lock.parent.mkdir(parents=True, exist_ok=True)
    return WeakFileLock(lock, timeout=patience_s)


def _complete(source: HubModel, place: Path, damaged: Sequence[str]) -> None:
    """Mark the directory as complete. Raises ModelNotFetched if it isn't: damaged files are removed."""
    for name in damaged:
        (place / name).unlink()
    if damaged:
        raise ModelNotFetched(f"files that differ from the hub's hashes were deleted, to be fetched again: {damaged}")
    if not (place / "config.json").exists() or not any(place.glob("*.safetensors")):
        raise ModelNotFetched(f"{source.name} has no config.json or no *.safetensors beside it: name another model")
    for path in place.iterdir():
        durable.sync(path)
    (place / COMPLETE).touch()
    durable.sync(place)


def _download(source: HubModel, place: Path, token: str | None) -> Sequence[str]:
    """Return the names of files that differ from the hub's hashes."""
    import huggingface_hub

    hub = huggingface_hub.HfApi(endpoint=source.endpoint, token=token or False)
    hub.snapshot_download(
        source.name, revision=source.revision, local_dir=place, allow_patterns=[*FILES], ignore_patterns=[*FOLDERS]
    )
    found = hub.verify_repo_checksums(source.name, revision=source.revision, local_dir=place)
    return [mismatch["path"] for mismatch in found.mismatches]


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m colocated_rl_rollout.fetch_model", description="Fetches a model of the Hugging Face hub."
    )
    parser.add_argument("--job-file", type=Path, default=Path(names.JOB_FILE))
    parser.add_argument("--models", type=Path, default=Path(names.MODEL_DIR), help="volume to fetch it into")
    given = parser.parse_args(arguments)
    job = JobFile.read(given.job_file.read_bytes())
    logs.configure(role=names.MODEL_CONTAINER, job=job.name, job_uid=job.uid)
    source = job.spec.model.hugging_face
    if source is None:
        parser.error("spec.model has no huggingFace: there is nothing to fetch")
    try:
        is_new = fetch(source, models=given.models, token=environment.get(names.ENV_HUB_TOKEN))
    except (ModelNotFetched, OSError) as error:
        logs.log(LOG, "model not fetched", logging.ERROR, reason=logs.in_words(error))
        return 1
    logs.log(LOG, "model fetched" if is_new else "model found", model=source.name, revision=source.revision)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
