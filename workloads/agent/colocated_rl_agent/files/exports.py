"""This module verifies exports in the pod's weights volume and removes older ones.

The trainer writes them, and the agent trusts only files it has read: an engine silently accepts missing tensors, wrong
names and torn files and reports success (H51, H52), so every file is compared with the manifest before an engine loads
it.

The volume may be a network volume shared with other pods. Its listing is cached: the agent's loop reads the cache, and
the agent lists the volume again only after actions that may change exports.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from pydantic import ValidationError

from colocated_rl_agent.files.tensor_parts import PartSample, sample_parts
from colocated_rl_agent.files.volume import (
    Beat,
    VolumeDirectory,
    VolumeSilent,
    in_threads,
)
from colocated_rl_api.back_off import doubled_s
from colocated_rl_api.logs import in_words
from colocated_rl_api.rungs import WeightVersion
from colocated_rl_api.weights import MANIFEST, Algorithm, Digest, Manifest, TensorEntry, algorithm_of

MAX_THREADS = 8  # for hashing
KNOWN_EXPORTS = 3  # whose tensors are remembered: what the engine holds, what comes next, and one rolled back
PIECE_BYTES = 256 * 1024
VERIFY_AGAIN_S = 1.0  # after the first failure, doubled after each further one: a try reads all files
VERIFY_AGAIN_MOST_S = 30.0
MAX_MANIFEST_BYTES = 64 * 1024 * 1024  # also of an index
MAX_HEADER_BYTES = 100_000_000  # of a safetensors file, by its specification
MESSAGE_CHARS = 1000
MOST_FAULTS = 3  # of a manifest, in a message
INDEX = "model.safetensors.index.json"
_HASHES: Mapping[Algorithm, Callable[[], Any]] = {Algorithm.XXH3_128: xxhash.xxh3_128, Algorithm.SHA256: hashlib.sha256}


class ExportTorn(Exception):
    """The files of an export differ from its manifest, or there is no manifest. Only a new export helps, unless a
    volume shared with other pods does not show the files yet.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message[:MESSAGE_CHARS])  # names in files are as long as their writer wants


@dataclass(frozen=True)
class TensorDigest:
    """Holds the digest of one exported tensor. dtype: as safetensors spells it.

    parts: samples of what each rank of an engine holds, if it has several and the tensor can be divided among them.
    """

    dtype: str
    digest: str
    parts: tuple[PartSample, ...] = ()


TensorDigests = Mapping[str, TensorDigest]  # by tensor name


@dataclass(frozen=True)
class TensorFile:
    """Holds what was found in a safetensors file. digest: of all its bytes."""

    digest: Digest
    tensors: Mapping[str, TensorEntry]
    digests: TensorDigests


class Exports:
    """The Exports are those that a pod sees.

    ranks: of an engine, which divide tensors; None: no engine is here, and no tensor gets a digest. whole: manifest of
    the newest verified export. tensors: of the newest few, by their digests. there: all versions in the volume; None:
    unknown since a possible change. verify_after: end of the back-off, on the clock of `time.monotonic`.
    """

    def __init__(self, volume: VolumeDirectory, *, ranks: int | None = 1) -> None:
        self._volume = volume
        self._ranks = ranks
        self.tensors: dict[WeightVersion, TensorDigests] = {}
        self._failures = 0  # in a row
        self.verify_after = 0.0
        self.whole: Manifest | None = None
        self.there: frozenset[WeightVersion] | None = None
        self._changes = 0

    async def verify(self, version: WeightVersion) -> Manifest:
        """Verify the export and return its manifest. Raises ExportTorn, VolumeSilent."""
        try:
            self.whole = await self._compare(version)
        except (ExportTorn, VolumeSilent):
            wait_s = doubled_s(VERIFY_AGAIN_S, self._failures, VERIFY_AGAIN_MOST_S)
            self._failures, self.verify_after = self._failures + 1, time.monotonic() + wait_s
            raise
        self._failures, self.verify_after = 0, 0.0
        return self.whole

    async def manifest(self, version: WeightVersion) -> Manifest:
        """Return the manifest of an export, or of an older one still served. Raises ExportTorn, VolumeSilent."""
        known = self.whole if self.whole is not None and self.whole.version == version else None
        return known or await self._compare(version)

    async def _compare(self, version: WeightVersion) -> Manifest:
        root, ranks = self._volume.place, self._ranks
        manifest, tensors = await self._volume.call(
            f"read export {version}", lambda beat: verify_export(root, version, beat, ranks=ranks)
        )
        if ranks is not None:
            self.tensors = dict([*self.tensors.items(), (version, tensors)][-KNOWN_EXPORTS:])
        return manifest

    async def look(self) -> None:
        """List the exports in the volume. Raises VolumeSilent, OSError."""
        root, changes = self._volume.place, self._changes
        found = await self._volume.call("list exports", lambda _: exports_in(root))
        if changes == self._changes:
            self.there = frozenset(found)

    def may_have_changed(self) -> None:
        self.there = None
        self._changes += 1

    def has_others_than(self, keep: WeightVersion | None) -> bool | None:
        """Return whether the volume holds exports besides `keep`; None: unknown."""
        return None if self.there is None else bool(self.there - {keep})

    async def remove_others_than(self, keep: WeightVersion) -> None:
        """Remove all exports but `keep`. Raises VolumeSilent, OSError."""
        root = self._volume.place
        await self._volume.call("remove exports", lambda beat: remove_exports(root, keep, beat))


def export_directory(root: Path, version: WeightVersion) -> Path:
    return root / str(version)


def verify_export(
    root: Path, version: WeightVersion, beat: Beat = lambda: None, *, ranks: int | None = 1
) -> tuple[Manifest, TensorDigests]:
    """Compare every file with the manifest, and return that with the digest of each tensor. Raises ExportTorn.

    Each file is read once, and all of them are: call it in a thread. ranks: of an engine; None: no digests of tensors.
    """
    directory = export_directory(root, version)
    manifest = _manifest(directory)
    if manifest.version != version:
        raise ExportTorn(f"{directory} holds version {manifest.version}")
    try:
        files = _read_files(directory, manifest, beat, ranks)
    except OSError as error:  # a trainer's files may be readable only by itself, or removed meanwhile
        raise ExportTorn(f"{directory} can't be read: {error}; the agent reads it through the pod's group") from error
    tensors: dict[str, TensorEntry] = {}
    digests: dict[str, TensorDigest] = {}
    for file in files:
        if twice := tensors.keys() & file.tensors:
            raise ExportTorn(f"tensor {min(twice)} stands in two files of {directory}")
        tensors |= file.tensors
        digests |= file.digests
    if tensors != manifest.tensors:
        different = sorted(
            name for name in tensors.keys() | manifest.tensors if tensors.get(name) != manifest.tensors.get(name)
        )
        raise ExportTorn(f"{directory} and its manifest differ in {len(different)} tensors, first {different[0]}")
    return manifest, digests


def _read_files(directory: Path, manifest: Manifest, beat: Beat, ranks: int | None) -> list[TensorFile]:
    """Return the content of all files once their digests agree. Raises ExportTorn, OSError."""
    files = {path.name for path in directory.glob("*.safetensors")}
    if files != set(manifest.digests):
        raise ExportTorn(f"{directory} holds {sorted(files)}, its manifest names {sorted(manifest.digests)}")
    _require_that_index_names(directory, files)

    def read(name: str) -> TensorFile:
        declared = manifest.digests[name]
        file = read_tensor_file(directory / name, algorithm_of(declared), beat, ranks=ranks)
        if file.digest != declared:
            raise ExportTorn(f"{directory / name} has digest {file.digest}, its manifest declares {declared}")
        return file

    return in_threads("read an export", read, sorted(files), at_once=min(os.cpu_count() or 1, MAX_THREADS))


def read_tensor_file(
    path: Path, algorithm: Algorithm = Algorithm.XXH3_128, beat: Beat = lambda: None, *, ranks: int | None = 1
) -> TensorFile:
    """Read a safetensors file once, from begin to end, and then a few rows of each tensor for samples of its parts.

    ranks: of an engine; None: no digests of tensors. Raises ExportTorn if it is no such file, OSError.
    """
    with path.open("rb") as stream:
        reader = _Reader(stream, _HASHES[algorithm](), beat)
        header = _header(reader, path)
        digests: dict[str, TensorDigest] = {}
        try:
            tensors = {
                name: TensorEntry(dtype=entry["dtype"], shape=tuple(entry["shape"])) for name, entry in header.items()
            }
            start = stream.tell()
            for name, begin, end in _places(header, tensors):
                if ranks is None:
                    reader.pass_over(end - begin)
                    continue
                shape, digest = tensors[name].shape, xxhash.xxh3_128()
                reader.pass_over(end - begin, digest)
                parts = sample_parts(stream, start + begin, shape=shape, size_bytes=end - begin, ranks=ranks)
                stream.seek(start + end)
                digests[name] = TensorDigest(tensors[name].dtype, digest.hexdigest(), parts)
            if reader.read(1):
                raise ValueError("it goes on after its last tensor")
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise ExportTorn(f"{path} is not a safetensors file: {in_words(error)}") from None
        return TensorFile(f"{algorithm}:{reader.whole.hexdigest()}", tensors, digests)


def _places(header: Mapping[str, Any], tensors: Mapping[str, TensorEntry]) -> Iterator[tuple[str, int, int]]:
    """Yield each tensor with its place, in order.

    Raises ValueError if they don't follow one another without a gap, as the format demands, or one has another size
    than its shape.
    """
    places = {name: tuple(map(int, entry["data_offsets"])) for name, entry in header.items()}
    reached = 0
    for name, (begin, end) in sorted(places.items(), key=lambda place: place[1]):
        if begin != reached or end - begin != tensors[name].size_bytes:
            raise ValueError(f"tensor {name} is at {begin} to {end}, those before it end at {reached}")
        yield name, begin, end
        reached = end


class _Reader:
    """Reads a file once for several digests. whole: the hash of all that was read."""

    def __init__(self, stream: io.BufferedReader, whole: Any, beat: Beat) -> None:
        self._stream = stream
        self.whole = whole
        self._beat = beat
        self._piece = memoryview(bytearray(PIECE_BYTES))

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes, or as many as there are."""
        data = self._stream.read(size)
        self.whole.update(data)
        return data

    def pass_over(self, size: int, *hashes: Any) -> None:
        """Feed the next `size` bytes to these hashes too. Raises ValueError if there are fewer."""
        if size < 0:
            raise ValueError(f"a tensor would have {size} bytes")
        while size > 0:
            if not (read := self._stream.readinto(self._piece[: min(size, PIECE_BYTES)])):
                raise ValueError(f"it ends {size} bytes before its tensors do")
            for each in (*hashes, self.whole):
                each.update(self._piece[:read])
            size -= read
            self._beat()


def exports_in(root: Path) -> dict[WeightVersion, Path]:
    """Return the export directories by version. The first call on a new volume makes the root."""
    root.mkdir(exist_ok=True)
    found = ((_version_in(path.name), path) for path in root.iterdir() if path.is_dir())
    return {version: path for version, path in found if version is not None}


def remove_exports(root: Path, keep: WeightVersion, beat: Beat = lambda: None) -> None:
    for version, directory in exports_in(root).items():
        if version != keep:
            with contextlib.suppress(FileNotFoundError):  # a call that was interrupted goes on, and removes it too
                shutil.rmtree(directory)
            beat()


def _version_in(name: str) -> WeightVersion | None:
    try:
        return WeightVersion.parse(name)
    except ValueError:
        return None


def _manifest(directory: Path) -> Manifest:
    try:
        return Manifest.model_validate_json(_read(directory / MANIFEST))
    except OSError as error:
        raise ExportTorn(f"{directory / MANIFEST} can't be read: {error}") from error
    except ValidationError as error:  # its own message quotes the file: it may be a link, and lead to the agent's keys
        found = error.errors(include_input=False)[:MOST_FAULTS]
        faults = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in found)
        raise ExportTorn(f"{directory / MANIFEST} can't be read: {'; '.join(faults)}") from None


def _read(path: Path) -> bytes:
    """Return a manifest or an index. Raises ExportTorn for one that is too long, OSError."""
    with path.open("rb") as stream:
        if os.fstat(stream.fileno()).st_size > MAX_MANIFEST_BYTES:
            raise ExportTorn(f"{path} is longer than {MAX_MANIFEST_BYTES} bytes")
        return stream.read(MAX_MANIFEST_BYTES)


def _require_that_index_names(directory: Path, files: set[str]) -> None:
    """Require that an index, if there is one, names all files: an engine silently reads no others (H52)."""
    index = directory / INDEX
    if not index.exists():
        return
    try:
        named = set(json.loads(_read(index))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ExportTorn(f"{index} can't be read: {in_words(error)}") from None  # its repr has the file
    if named != files:
        raise ExportTorn(
            f"{index} names {sorted(map(str, named))}, the export holds {sorted(files)}: write one that fits, or none"
        )


def _header(reader: _Reader, path: Path) -> dict[str, Any]:
    """Return the entries of a safetensors file by tensor name; the tensors come next. Raises ExportTorn, OSError."""
    start = reader.read(8)
    size = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
    if not 2 <= size <= MAX_HEADER_BYTES:
        raise ExportTorn(f"{path} is not a safetensors file")
    try:
        return {name: entry for name, entry in json.loads(reader.read(size)).items() if name != "__metadata__"}
    except (ValueError, AttributeError, RecursionError) as error:
        raise ExportTorn(f"{path} is not a safetensors file: {error}") from error
