"""Each input that is kept for the fuzzer, those that once broke something among them, once more."""

from __future__ import annotations

import pytest

from fuzz.targets import CORPUS, PLACES, corpus, load

CONTRACT = {"batch_shard"}  # needs torch: `contract/test_trainer_batch.py`


def test_each_target_has_a_corpus_of_small_files_and_each_corpus_a_target() -> None:
    assert set(PLACES) == {place.name for place in CORPUS.iterdir()}
    for name, place in PLACES.items():
        assert [] == [file.name for file in corpus(name) if file.stat().st_size > place.longest]


@pytest.mark.parametrize("name", sorted(set(PLACES) - CONTRACT))
def test_no_input_of_the_corpus_does_what_must_not_happen(name: str) -> None:
    target = load(name)
    for file in corpus(name):
        try:
            target(file.read_bytes())
        except BaseException as error:
            error.add_note(f"input: {file}")
            raise
