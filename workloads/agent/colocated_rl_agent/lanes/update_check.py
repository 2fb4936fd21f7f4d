"""The update check requires that an update changed what the engine holds exactly where the exported tensors changed.

An engine reports success for an update that misses tensors or changes nothing (H52), and outputs can't show it: a
training step moves them by less than 16-bit arithmetic does. So the check looks at what the engine holds, by the
checksums that SGLang computes of each parameter in memory:

* A parameter whose tensors differ between two exports has another checksum after the update, both than before the
  switch and than just before the update, when released memory held anything.
* A parameter whose tensors are equal in both exports has the checksum that it had.
* Some parameter has changed if any tensor has, or at least has the name of one. An engine ignores all tensors of a
  trainer that exports them under names of its own, a wrapper's prefix for instance, and would serve the initial weights
  for ever.

Engines fuse, rename and split tensors. The parts of a fused parameter are found by name, and names may begin
differently: SGLang has GPT-NeoX's `gpt_neox.layers.0.…` as `model.layers.0.…`. Of a parameter that is split over ranks,
each rank's part has to change where it has changed for certain (`files/tensor_parts.py`), and some rank's where the
tensor did. A parameter of another name (scales, buffers) is not judged. Where the engine computes in a narrower type
than the export has, or quantizes, a small change may vanish, so only the second half is judged.

Two faults it can't detect. Tensors that another change put in the place of the right ones, for instance two layers
exchanged: a checksum depends on the engine's layout, so it compares with those of other engines alone, and the probe
has to find it. And one part of a fused parameter that was left as it was while another part changed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import chain

from colocated_rl_agent.files.exports import TensorDigest, TensorDigests
from colocated_rl_agent.lanes.probe import WeightsDoubted

Checksums = Mapping[str, tuple[str, ...]]  # of each rank that holds a part of it, by the engine's parameter name


# engine's part of a parameter name -> parts of the export's tensor names
_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
_EXPERTS = {  # Mixtral has their engine's names in its files
    "w13_weight": ("gate_proj.weight", "up_proj.weight", "w1.weight", "w3.weight"),
    "w2_weight": ("down_proj.weight", "w2.weight"),
}
_NUMBERED = re.compile(r"(?P<start>(?:[^.\d][^.]*\.)*?)(?P<rest>[^.]+\.\d+\..+)")  # "model.", "layers.0.mlp.up.weight"
_EXPERT = re.compile(r"(?P<layer>.*\.experts)\.(?P<part>w13_weight|w2_weight)")

# (dtype of the export, of the engine): each value of the first is one of the second; auto: SGLang takes the export's
_KEEPS_ALL = {
    ("BF16", "bfloat16"), ("BF16", "float32"), ("BF16", "auto"),
    ("F16", "float16"), ("F16", "float32"), ("F16", "auto"),
    ("F32", "float32"),
}  # fmt: skip


class UpdateDoubted(WeightsDoubted):
    """Parameters in the engine's memory did not change as the exported tensors did."""


def require_changes(
    old: TensorDigests, new: TensorDigests, held: Checksums, found: Checksums, *, before: Checksums | None, dtype: str
) -> int:
    """Return how many parameters were judged. Raises UpdateDoubted.

    old, new: exports that the engine held and holds. held: checksums with `old`. before: just before the update, if
    memory was released meanwhile. found: after the update. dtype: of the engine; "quantized" if it quantizes.
    """
    formers_of = {name: (held.get(name), (before or held).get(name)) for name in found}
    is_untouched = old != new and all(checksums in formers_of[name] for name, checksums in found.items())
    if found and is_untouched and not any(_sources(name, new.keys()) for name in found):
        raise UpdateDoubted(
            f"none of the {len(found)} parameters in its memory has changed, or has the name of an exported tensor, as "
            f"{min(new)}: the engine ignored them all; the trainer has to export tensors under the names of the "
            "model's own files"
        )
    judged, wrong = 0, list[str]()
    of_parameters = _sources_of(found.keys(), old.keys() | new.keys())
    for name, checksums in found.items():
        sources = of_parameters[name]
        if not sources or name not in held:
            continue
        if all(old.get(each) == new.get(each) for each in sources):
            is_right = checksums == held[name]
        elif all(each in new and (new[each].dtype, dtype) in _KEEPS_ALL for each in sources):
            formers = [former for former in formers_of[name] if former is not None]
            is_right = checksums not in formers and not any(
                checksums[rank] == former[rank]
                for rank in _ranks_that_changed(name, [(old.get(each), new[each]) for each in sources], len(checksums))
                for former in formers
            )
        else:
            continue
        judged += 1
        if not is_right:
            wrong.append(name)
    if wrong:
        raise UpdateDoubted(
            f"{len(wrong)} of {judged} parameters in its memory did not change as the exported tensors did, first "
            f"{min(wrong)}: the engine does not hold the weights that were exported"
        )
    return judged


def _ranks_that_changed(
    parameter: str, tensors: Sequence[tuple[TensorDigest | None, TensorDigest]], ranks: int
) -> Sequence[int]:
    """Return the ranks whose part of a parameter has changed for certain. tensors: it is made of, before and after.

    A rank may hold some experts alone, so its part has changed for certain only if all of them have.
    """
    if any(old is None or not len(old.parts) == len(new.parts) == ranks for old, new in tensors):
        return ()
    of_all = all if _EXPERT.fullmatch(parameter) else any
    return [
        rank
        for rank in range(ranks)
        if of_all(old is not None and old.parts[rank].changed_to(new.parts[rank]) for old, new in tensors)
    ]


def _sources_of(parameters: Set[str], tensors: Set[str]) -> Mapping[str, tuple[str, ...]]:
    """Return the names of the tensors that make up each parameter; none where they are not known.

    Where no parameter that begins alike has tensors of its own name, they have the tensors that begin alike and fit
    most of them, and that no others have: a vision tower does not get those of the text.
    """
    found = {each: _sources(each, tensors) for each in parameters}
    known = {start for each, sources in found.items() if sources for start, _ in _numbered(each)}
    rests = defaultdict[str, set[str]](set)  # of the tensors' names, by how they begin
    for start, rest in chain.from_iterable(map(_numbered, tensors)):
        rests[start].add(rest)
    fits = defaultdict[tuple[str, str], dict[str, tuple[str, ...]]](dict)
    for parameter, (ours, rest) in ((each, numbered) for each in parameters for numbered in _numbered(each)):
        for theirs in () if ours in known else rests:
            if theirs not in known and (sources := _sources(rest, rests[theirs])):
                fits[ours, theirs][parameter] = tuple(f"{theirs}{each}" for each in sources)
    named, given = set[str](), set[str]()
    for (ours, theirs), fit in sorted(fits.items(), key=lambda item: len(item[1]), reverse=True):
        if ours not in named and theirs not in given:
            named.add(ours)
            given.add(theirs)
            found |= fit
    return found


def _numbered(name: str) -> Iterator[tuple[str, str]]:
    """Yield how the name of a tensor of a layer begins, and its rest from there on; nothing for another name."""
    if parts := _NUMBERED.fullmatch(name):
        yield parts["start"], parts["rest"]


def _sources(parameter: str, tensors: Set[str]) -> tuple[str, ...]:
    """Return the names of the exported tensors that make up a parameter; none if its name is unknown."""
    if parameter in tensors:
        return (parameter,)
    if (expert := _EXPERT.fullmatch(parameter)) is not None:
        start, ends = f"{expert['layer']}.", _EXPERTS[expert["part"]]
        return tuple(sorted(each for each in tensors if each.startswith(start) and each.endswith(ends)))
    for parts in _parts(parameter):
        if all(part in tensors for part in parts):
            return parts
    return ()


def _parts(parameter: str) -> Iterator[tuple[str, ...]]:
    for fused, parts in _FUSED.items():
        if f".{fused}." in parameter:
            yield tuple(parameter.replace(f".{fused}.", f".{part}.") for part in parts)
