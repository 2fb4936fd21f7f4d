"""The check of an update accepts and rejects over engines that fuse, split and convert tensors."""

from __future__ import annotations

import hashlib
import io
import json
import math
import random
import struct
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colocated_rl_agent.files.exports import TensorDigest, read_tensor_file
from colocated_rl_agent.files.tensor_parts import PartSample, sample_parts
from colocated_rl_agent.lanes.update_check import Checksums, UpdateDoubted, require_changes

Values = dict[str, int]  # of each exported tensor

LAYERS = ("model.layers.0", "model.layers.1")
PARTS = (
    *("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.o_proj.weight"),
    *("mlp.experts.0.gate_proj.weight", "mlp.experts.0.up_proj.weight", "mlp.experts.0.down_proj.weight"),
    *("mlp.experts.1.gate_proj.weight", "mlp.experts.1.up_proj.weight", "mlp.experts.1.down_proj.weight"),
    *("mlp.shared.gate_proj.weight", "mlp.shared.up_proj.weight"),
)
NAMES = ("model.embed_tokens.weight", *(f"{layer}.{part}" for layer in LAYERS for part in PARTS))
FUSED = {
    "self_attn.qkv_proj.weight": PARTS[:3],
    "self_attn.o_proj.weight": PARTS[3:4],
    "mlp.experts.w13_weight": (PARTS[4], PARTS[5], PARTS[7], PARTS[8]),
    "mlp.experts.w2_weight": (PARTS[6], PARTS[9]),
    "mlp.shared.gate_up_proj.weight": PARTS[10:],
}
versions = st.fixed_dictionaries({name: st.integers(0, 3) for name in NAMES})


def exported(values: Values, dtype: str = "BF16") -> dict[str, TensorDigest]:
    return {name: TensorDigest(dtype, str(value)) for name, value in values.items()}


def loaded(values: Values, *, ranks: int = 2) -> dict[str, tuple[str, ...]]:
    """Return what a correctly loading engine holds: each rank has half of every matrix, and some scales of its own."""
    held: dict[str, tuple[int, ...]] = {"model.k_scale": (1,)}
    held["model.embed_tokens.weight"] = (values["model.embed_tokens.weight"],)
    for layer in LAYERS:
        for name, parts in FUSED.items():
            held[f"{layer}.{name}"] = tuple(values[f"{layer}.{part}"] for part in parts)
    return {name: tuple(f"{rank}{parts}" for rank in range(ranks)) for name, parts in held.items()}


def judge(old: Values, new: Values, found: Checksums, before: Checksums | None = None, dtype: str = "bfloat16") -> int:
    return require_changes(exported(old), exported(new), loaded(old), found, before=before, dtype=dtype)


@given(old=versions, new=versions, ranks=st.sampled_from([1, 2, 4]))
def test_an_engine_that_loads_what_was_exported_is_accepted_and_every_weight_of_it_judged(
    old: Values, new: Values, ranks: int
) -> None:
    found = loaded(new, ranks=ranks)
    held = loaded(old, ranks=ranks)
    judged = require_changes(exported(old), exported(new), held, found, before=None, dtype="bfloat16")
    assert len(found) - 1 == judged, "all but the scales, which no export has"


@given(old=versions, new=versions, data=st.data())
def test_one_parameter_that_keeps_its_old_tensors_is_found(old: Values, new: Values, data: st.DataObject) -> None:
    right, held = loaded(new), loaded(old)
    changed = sorted(name for name in right if right[name] != held[name])
    if not changed:
        return
    kept = data.draw(st.sampled_from(changed))
    with pytest.raises(UpdateDoubted, match=f"1 of {len(right) - 1} .* first {kept}:"):
        judge(old, new, right | {kept: held[kept]})


@given(old=versions, new=versions, data=st.data())
def test_one_parameter_that_an_update_left_as_released_memory_had_it_is_found(
    old: Values, new: Values, data: st.DataObject
) -> None:
    right, held = loaded(new), loaded(old)
    changed = sorted(name for name in right if right[name] != held[name])
    if not changed:
        return
    garbage: dict[str, tuple[str, ...]] = dict.fromkeys(right, ("zeros", "zeros"))
    assert judge(old, new, right, garbage), "what it wrote over is no matter"
    left = data.draw(st.sampled_from(changed))
    with pytest.raises(UpdateDoubted, match=f"first {left}:"):
        judge(old, new, right | {left: garbage[left]}, garbage)


@given(old=versions, others=st.sampled_from([("of", "others"), ("", "")]), data=st.data())
def test_a_parameter_that_changed_though_its_tensors_did_not_is_found(
    old: Values, others: tuple[str, str], data: st.DataObject
) -> None:
    held = loaded(old)
    touched = data.draw(st.sampled_from(sorted(held.keys() - {"model.k_scale"})))
    with pytest.raises(UpdateDoubted, match=f"first {touched}:"):
        judge(old, old, held | {touched: others})


@pytest.mark.parametrize(
    ("export", "engine", "must_change"),
    [
        *[("BF16", "bfloat16", True), ("BF16", "auto", True), ("BF16", "float32", True), ("F32", "float32", True)],
        *[("F32", "bfloat16", False), ("F32", "auto", False), ("BF16", "float16", False), ("BF16", "quantized", False)],
    ],
)
def test_a_change_may_vanish_where_the_engine_has_fewer_bits(export: str, engine: str, must_change: bool) -> None:
    old, new = {"w": TensorDigest(export, "1")}, {"w": TensorDigest(export, "2")}
    held = {"w": ("same",)}
    if must_change:
        with pytest.raises(UpdateDoubted):
            require_changes(old, new, held, held, before=None, dtype=engine)
    else:
        assert 1 == require_changes(old, old, held, held, before=None, dtype=engine)
        assert 0 == require_changes(old, new, held, held, before=None, dtype=engine), "a change is not judged"


def test_h52_tensors_of_which_the_engine_knows_no_name_are_no_update() -> None:
    """Engines served their first weights for ever beside a trainer that exported under the name of its wrapper."""
    old, new = (dict.fromkeys(NAMES, value) for value in (1, 2))
    wrapped_old, wrapped = (
        {f"module.{name}": digest for name, digest in exported(values).items()} for values in (old, new)
    )
    for before in (exported(old), wrapped_old):
        with pytest.raises(
            UpdateDoubted, match=r"none of the 12 .* as module\.model\.embed_tokens\.weight: the engine"
        ):
            require_changes(before, wrapped, loaded(old), loaded(old), before=None, dtype="bfloat16")
    assert 0 == require_changes(exported(old), wrapped, {}, {}, before=None, dtype="bfloat16"), "none is known"


def test_tensors_of_which_the_engine_knows_no_name_are_an_update_if_it_took_them() -> None:
    """Each engine of GPT-NeoX was ended at its first update."""
    old, new = ({"gpt_neox.embed_in.weight": TensorDigest("F32", version)} for version in ("before", "after"))
    held, found, left = ({"model.embed_in.weight": (each,)} for each in ("before", "after", "zeros"))
    assert 0 == require_changes(old, new, held, found, before=None, dtype="float32")
    assert 0 == require_changes(old, new, held, found, before=left, dtype="float32")
    assert 0 == require_changes(old, old, held, held, before=None, dtype="float32")
    for ignored, before in ((held, None), (held, left), (left, left)):
        with pytest.raises(UpdateDoubted, match=r"none of the 1 .* as gpt_neox\.embed_in\.weight: the engine ignored"):
            require_changes(old, new, held, ignored, before=before, dtype="float32")


TEXT, VISION = "model.layers.", "image.layers."


@pytest.mark.parametrize(("ours", "theirs"), [("model.", "gpt_neox."), (TEXT, "model.language_model.layers.")])
@given(old=versions, new=versions, data=st.data())
def test_parameters_whose_names_begin_otherwise_than_in_the_files_are_judged(
    ours: str, theirs: str, old: Values, new: Values, data: st.DataObject
) -> None:
    before, after = ({name.replace(ours, theirs): each for name, each in exported(of).items()} for of in (old, new))
    held, found = loaded(old), loaded(new)
    layers = {name for name in found if name.startswith(TEXT)}
    others = len(found.keys() - layers) - 1 if ours == TEXT else 0
    assert len(layers) + others == require_changes(before, after, held, found, before=None, dtype="bfloat16")
    changed = sorted(name for name in layers if found[name] != held[name])
    if changed:
        kept = data.draw(st.sampled_from(changed))
        with pytest.raises(UpdateDoubted, match=f"first {kept}:|none of the"):
            require_changes(before, after, held, found | {kept: held[kept]}, before=None, dtype="bfloat16")


@pytest.mark.parametrize("theirs", [TEXT, "model.language_model.layers.", "layers."])
def test_what_an_engine_has_beside_the_text_is_not_judged_by_the_tensors_of_the_text(theirs: str) -> None:
    """A vision tower has the same names from the number on, and stays as it is."""
    old, new = ({f"{theirs}0.{part}": each for part in PARTS} for each in (1, 2))
    values = ({name.replace(theirs, TEXT): value for name, value in each.items()} for each in (old, new))
    held, found = ({f"{TEXT}0.{part}": (str(of[f"{TEXT}0.{part}"]),) for part in PARTS} for of in values)
    tower = {f"{VISION}0.{part}": ("stays",) for part in PARTS[:4]}
    assert len(PARTS) == require_changes(
        exported(old), exported(new), tower | held, tower | found, before=None, dtype="bfloat16"
    )
    beside = {f"model.{VISION}0.{part}": TensorDigest("BF16", "same") for part in PARTS[:4]}
    assert len(PARTS) + 4 == require_changes(
        exported(old) | beside, exported(new) | beside, tower | held, tower | found, before=None, dtype="bfloat16"
    )


def test_experts_of_mixtral_have_other_names() -> None:
    mixture = "model.layers.0.block_sparse_moe.experts"
    names = [f"{mixture}.{expert}.w{part}.weight" for expert in (0, 1) for part in (1, 2, 3)]
    old, new = (exported(dict.fromkeys(names, value)) for value in (1, 2))
    held, found = ({f"{mixture}.{part}": (of,) for part in ("w13_weight", "w2_weight")} for of in ("before", "after"))
    assert 2 == require_changes(old, new, held, found, before=None, dtype="bfloat16")
    for stale in held:
        with pytest.raises(UpdateDoubted, match=f"1 of 2 .* first {stale}:"):
            require_changes(old, new, held, found | {stale: held[stale]}, before=None, dtype="bfloat16")


def test_a_parameter_is_judged_beside_one_whose_change_may_vanish() -> None:
    old, new = (
        {"a": TensorDigest("F32", version), "b": TensorDigest("BF16", version)} for version in ("before", "after")
    )
    held = {"a": ("same",), "b": ("same",)}
    with pytest.raises(UpdateDoubted, match=r"1 of 1 .* first b:"):
        require_changes(old, new, held, held, before=None, dtype="bfloat16")


# ----------------------------------------------------------------------------------- an engine of ranks with real bytes
RANKS, ROWS, COLUMNS = 4, 64, 16  # bytes, one an element
MATRICES = {
    "a.q_proj.weight": "rows", "a.k_proj.weight": "rows", "a.v_proj.weight": "rows", "a.o_proj.weight": "columns",
    "a.norm.weight": "whole",
}  # fmt: skip
HELD = {
    "a.qkv_proj.weight": ("a.q_proj.weight", "a.k_proj.weight", "a.v_proj.weight"),
    "a.o_proj.weight": ("a.o_proj.weight",),
    "a.norm.weight": ("a.norm.weight",),
}
Weights = dict[str, bytearray]


def write(directory: Path, weights: Weights) -> Mapping[str, TensorDigest]:
    """Export them, and return what an agent reads."""
    entries, data = {}, b""
    for name, content in weights.items():
        offsets = [len(data), len(data) + len(content)]
        shape = [ROWS, COLUMNS] if len(content) == ROWS * COLUMNS else [len(content)]
        entries[name] = {"dtype": "F8_E4M3", "shape": shape, "data_offsets": offsets}
        data += content
    header = json.dumps(entries).encode()
    directory.mkdir(exist_ok=True)
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)
    found = read_tensor_file(directory / "model.safetensors", ranks=RANKS).digests
    return {name: replace(tensor, dtype="BF16") for name, tensor in found.items()}


def part(name: str, content: bytes, rank: int) -> bytes:
    """Return what a rank holds of a tensor. Those of keys and values have two heads, which two ranks each share."""
    if MATRICES[name] == "whole":
        return content
    if MATRICES[name] == "columns":
        width = COLUMNS // RANKS
        rows = (content[start : start + COLUMNS] for start in range(0, len(content), COLUMNS))
        return b"".join(row[rank * width : (rank + 1) * width] for row in rows)
    shares = RANKS if "q_proj" in name else 2
    size, share = len(content) // shares, rank * shares // RANKS
    return content[share * size : (share + 1) * size]


def held_by_ranks(weights: Weights) -> dict[str, tuple[str, ...]]:
    return {
        parameter: tuple(
            hashlib.sha256(b"".join(part(name, bytes(weights[name]), rank) for name in sources)).hexdigest()
            for rank in range(RANKS)
        )
        for parameter, sources in HELD.items()
    }


def drawn(data: st.DataObject, of: random.Random) -> tuple[Weights, Weights]:
    """Draw weights, and those of a step that changed from none to all of the elements of each tensor."""
    old = {
        name: bytearray(of.randbytes(ROWS * COLUMNS if kind != "whole" else COLUMNS)) for name, kind in MATRICES.items()
    }
    new = {name: bytearray(content) for name, content in old.items()}
    for content in new.values():
        share = data.draw(st.sampled_from([0.0, 0.002, 0.05, 0.5, 1.0]))
        for place in range(len(content)):
            if of.random() < share:
                content[place] ^= 1
    return old, new


@settings(max_examples=60)
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_a_right_engine_of_ranks_is_accepted_however_little_a_step_changed(data: st.DataObject, seed: int) -> None:
    old, new = drawn(data, random.Random(seed))
    with tempfile.TemporaryDirectory() as folder:
        exports = write(Path(folder) / "old", old), write(Path(folder) / "new", new)
    held, found = held_by_ranks(old), held_by_ranks(new)
    assert 3 == require_changes(*exports, held, found, before=None, dtype="bfloat16")


@pytest.mark.parametrize("parameter", HELD)
@pytest.mark.parametrize("stale", range(RANKS))
@pytest.mark.parametrize("share", [0.05, 1.0])
def test_one_rank_that_keeps_its_part_of_the_version_before_is_found(
    tmp_path: Path, parameter: str, stale: int, share: float
) -> None:
    """The other ranks' parts changed, and so did the parameter as a whole."""
    of = random.Random(1)
    old = {
        name: bytearray(of.randbytes(ROWS * COLUMNS if kind != "whole" else COLUMNS)) for name, kind in MATRICES.items()
    }
    new = {name: bytearray(each ^ (of.random() < share) for each in content) for name, content in old.items()}
    new["a.norm.weight"][:] = bytes(each ^ 1 for each in old["a.norm.weight"])
    exports = write(tmp_path / "old", old), write(tmp_path / "new", new)
    held, found = held_by_ranks(old), held_by_ranks(new)
    found[parameter] = tuple(
        held[parameter][rank] if rank == stale else found[parameter][rank] for rank in range(RANKS)
    )
    with pytest.raises(UpdateDoubted, match=f"1 of 3 .* first {parameter}:"):
        require_changes(*exports, held, found, before=None, dtype="bfloat16")


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0), (1, 2), (3, 2), (2, 3), (3, 3), (2, 1)])
def test_ranks_are_judged_only_by_samples_of_as_many_parts_before_and_after(before: int, after: int) -> None:
    """The export before may have been read for an engine of another shape."""
    old, new = (
        {"w": TensorDigest("BF16", version, (PartSample(version, None),) * parts)}
        for version, parts in (("before", before), ("after", after))
    )
    held, found = {"w": ("same", "before")}, {"w": ("same", "after")}
    assert 1 == require_changes(old, new, held, found, before=None, dtype="bfloat16")


def test_a_rank_may_hold_some_of_the_experts_alone(tmp_path: Path) -> None:
    """Only one expert changed: nobody knows which rank has it."""
    names = [f"m.experts.{number}.down_proj.weight" for number in range(2)]
    old = {name: bytearray(ROWS * COLUMNS) for name in names}
    new = {**old, names[0]: bytearray(b"\x01" * ROWS * COLUMNS)}
    exports = write(tmp_path / "old", old), write(tmp_path / "new", new)
    held, found = ({"m.experts.w2_weight": parts} for parts in (("a", "b", "c", "d"), ("e", "f", "c", "d")))
    assert 1 == require_changes(*exports, held, found, before=None, dtype="bfloat16")
    both = write(tmp_path / "new", dict.fromkeys(names, bytearray(b"\x01" * ROWS * COLUMNS)))
    with pytest.raises(UpdateDoubted, match=r"first m\.experts\.w2_weight:"):
        require_changes(exports[0], both, held, found, before=None, dtype="bfloat16")


@pytest.mark.parametrize("shape", [[], [6], [6, 8], [8, 6], [2, 4, 4], [0, 4]])
def test_a_tensor_that_can_not_be_divided_evenly_has_no_parts(shape: list[int]) -> None:
    size = math.prod(shape)
    assert () == sample_parts(io.BytesIO(bytes(size)), 0, shape=shape, size_bytes=size, ranks=4)


def test_one_rank_needs_no_parts() -> None:
    assert () == sample_parts(io.BytesIO(bytes(16)), 0, shape=[4, 4], size_bytes=16, ranks=1)
