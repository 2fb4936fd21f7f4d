"""Switches of one device show what they have to, or fall short of it, and a page says so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.gpu.switches import HEADING, MIB, MeasuredSwitch, Proof, placed
from setup.layout import CHECKOUT

GOOD = MeasuredSwitch(
    serving=70_000 * MIB,
    released=1_000 * MIB,
    trained=20_000 * MIB,
    offloaded=1_000 * MIB,
    served_again=70_000 * MIB,
    took_s=4.0,
    step_s=0.5,
    tokens=32_768,
    processes=("engine", "trainer"),
)
PAGE = f"# Figures\n\n{HEADING}\n\nWhat is measured.\n\n## Others\n\nMore.\n"


def proof_of(
    *switches: MeasuredSwitch, name: str = "0.6B", ended: str | None = None, problems: tuple[str, ...] = ()
) -> Proof:
    return Proof(
        name=name,
        asked=10,
        switches=switches,
        flops=4e9,
        peak_flops=8e14,
        released_by="torch_memory_saver",
        ended=ended,
        problems=problems,
    )


def with_residues(*residues: float) -> Proof:
    """Switches that leave so many MiB, one after the other."""
    return proof_of(*(replace(GOOD, offloaded=int(residue * MIB)) for residue in residues))


def test_switches_that_give_everything_back_fall_short_of_nothing() -> None:
    proof = proof_of(*[GOOD] * 10)

    assert [] == list(proof.shortfalls())
    assert ([1.0] * 10, [1.0] * 10, 0.0) == (proof.freed_by_engine, proof.freed_by_trainer, proof.slope)
    assert 65_536 == proof.tokens_per_s
    assert 4e9 * 65_536 / 8e14 == proof.share_of_peak


@pytest.mark.parametrize(
    ("changed", "shortfall"),
    [
        (replace(GOOD, processes=("another", "trainer")), "a process was replaced"),
        (replace(GOOD, processes=("engine", "another")), "a process was replaced"),
        (replace(GOOD, released=8_000 * MIB), "the engine gave back 0.899 of what it took, and not 0.9"),
        (replace(GOOD, offloaded=3_000 * MIB), "the trainer gave back 0.895 of what it took, and not 0.9"),
        (replace(GOOD, trained=GOOD.released), "1 times the trainer took nothing of the device"),
    ],
)
def test_one_switch_that_falls_short_is_enough(changed: MeasuredSwitch, shortfall: str) -> None:
    switches = [*[GOOD] * 5, changed, *[GOOD] * 4]
    assert shortfall in list(proof_of(*switches).shortfalls())


def test_the_engine_is_compared_with_what_it_took_when_it_was_let_in() -> None:
    """The first release is compared with what it takes after it: its start took memory of its program's own too."""
    first = replace(GOOD, serving=GOOD.serving + 500 * MIB, released=1_500 * MIB, trained=20_500 * MIB)
    grown = replace(GOOD, serving=GOOD.serving + 20_000 * MIB, released=21_000 * MIB, trained=40_000 * MIB)

    assert [1.0, 1.0] == proof_of(first, GOOD).freed_by_engine
    assert pytest.approx(69 / 89, abs=1e-9) == proof_of(GOOD, grown).freed_by_engine[1]


def test_a_residue_that_grows_falls_short_from_one_mib_a_switch() -> None:
    below, above = (with_residues(*(1000 + growth * number for number in range(10))) for growth in (0.9, 1.1))

    assert [] == list(below.shortfalls())
    assert ["the residue grows by 1.10 MiB a switch"] == list(above.shortfalls())


def test_what_the_first_switches_load_is_no_growth() -> None:
    assert with_residues(800, 990, *[1000] * 8).slope == 0


def test_switches_that_are_too_few_or_ended_early_show_nothing() -> None:
    ended = proof_of(*[GOOD] * 4, ended="TimeoutError: no progress", problems=("EngineLost",))

    assert [
        "ended after 4 of 10 switches: TimeoutError: no progress",
        "the pod reported EngineLost",
        "no slope from 4 switches",
    ] == list(ended.shortfalls())
    assert [] != list(proof_of(ended="it did not start").shortfalls())


def test_each_model_has_its_place_on_the_page_and_keeps_the_others() -> None:
    of_both = PAGE
    for proof in (proof_of(*[GOOD] * 10), proof_of(*[GOOD] * 9, name="7B-LoRA")):
        of_both = placed(of_both, proof, conditions="A day, a device.")
    again = placed(of_both, proof_of(*[GOOD] * 10), conditions="Another day.")

    assert ["0.6B", "7B-LoRA"] == headings(of_both)
    assert ["7B-LoRA", "0.6B"] == headings(again)
    assert (1, 1) == (again.count("A day, a device."), again.count("Another day."))
    assert again.startswith(PAGE.partition("\n## Others")[0].rstrip())
    assert again.endswith("\n\n## Others\n\nMore.\n")
    assert "| falls short | ended after 9 of 10 switches: None; " not in again
    assert "falls short | ended after 9 of 10" in again


def test_the_page_has_the_place() -> None:
    page = (CHECKOUT.root / "docs/measurements.md").read_text()

    assert placed(page, proof_of(GOOD, name="another"), conditions="").startswith(page.rstrip())
    with pytest.raises(ValueError, match="no heading"):
        placed("# Figures\n", proof_of(GOOD), conditions="")


def headings(page: str) -> list[str]:
    return [line.removeprefix("### ") for line in page.splitlines() if line.startswith("### ")]
