"""The check of an update accepts and rejects over engines that fuse, split and convert tensors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colocated_rl_agent.files.exports import TensorDigest
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


@given(old=versions, data=st.data())
def test_a_parameter_that_changed_though_its_tensors_did_not_is_found(old: Values, data: st.DataObject) -> None:
    held = loaded(old)
    touched = data.draw(st.sampled_from(sorted(held.keys() - {"model.k_scale"})))
    with pytest.raises(UpdateDoubted, match=f"first {touched}:"):
        judge(old, old, held | {touched: ("of", "others")})


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
        require_changes(old, new, held, held, before=None, dtype=engine)
