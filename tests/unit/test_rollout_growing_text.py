"""Text of a stream: what is told as tokens come is the beginning of what all of them decode to, whatever they are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from colocated_rl_rollout.gateway.growing_text import (
    CUT_OFF,
    KEPT,
    WINDOW,
    GrowingText,
    last_words,
    text_behind,
)
from colocated_rl_rollout.pages.words import spans
from colocated_rl_rollout.store.transcripts import Transcript

SPECIAL = ["<|end|>", "<|call|>"]
BYTES = [f"<0x{value:02X}>" for value in range(256)]
CHARACTERS = [*"ab.☃é", "\U0001f600"]


def byte_level() -> Tokenizer:
    """Each token some bytes: whole characters, parts of them, and what is no text at all."""
    names = dict(zip(unicode_bytes(), sorted(pre_tokenizers.ByteLevel.alphabet()), strict=True))
    parts = [
        "☃".encode(),
        "\U0001f600".encode()[:3],
        b"\x83a",
        b" b",
        b"\xff\xe2",
        b"\xe2\x98",
        b"the",
        CUT_OFF.encode(),
    ]
    words = [*SPECIAL, *names.values(), *("".join(names[value] for value in part) for part in parts)]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def unicode_bytes() -> list[int]:
    """The bytes in the order of the characters that stand for them."""
    kept = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [value for value in range(256) if value not in kept]
    return [*kept, *others]


def byte_fallback() -> Tokenizer:
    """Return a tokenizer like Llama's: words with a mark for their space, and a byte each of whatever has no word."""
    words = [*SPECIAL, *BYTES, "▁", "▁a", "▁the", *CHARACTERS]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def metaspace() -> Tokenizer:
    words = [*SPECIAL, "▁", "▁a", "▁the", *CHARACTERS]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def word_piece() -> Tokenizer:
    words = [*SPECIAL, "a", "the", "##s", ".", "n't", "##☃"]
    tokenizer = Tokenizer(models.WordPiece({word: number for number, word in enumerate(words)}, unk_token="a"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


class CountingTokenizer:
    """Counts what it decodes. decoded: the longest that was decoded at once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.size: int = tokenizer.get_vocab_size()
        words: dict[str, int] = tokenizer.get_vocab()
        self.special_ids = frozenset(words[word] for word in SPECIAL)
        self.byte_ids = frozenset(words[word] for word in BYTES if word in words)
        self.decoded = 0

    def text(self, ids: Sequence[int]) -> str:
        self.decoded = max(self.decoded, len(ids))
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


TOKENIZERS = {"bytes": byte_level(), "fallback": byte_fallback(), "metaspace": metaspace(), "pieces": word_piece()}


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=100)
@given(data=st.data())
def test_pieces_add_up_to_a_beginning_of_what_all_tokens_decode_to(name: str, data: st.DataObject) -> None:
    """However many come at a time; and no more of them is held back than a character or a row of bytes."""
    decoder = CountingTokenizer(TOKENIZERS[name])
    steps = data.draw(st.lists(st.lists(st.integers(0, decoder.size - 1), min_size=1, max_size=4), max_size=40))
    before = data.draw(st.lists(st.integers(0, decoder.size - 1), max_size=2 * KEPT))
    behind = last_words(decoder, before)
    growing = GrowingText(decoder, behind=behind)
    ids: list[int] = []
    text = ""
    for step in steps:
        ids += step
        text += growing.more(step)
        whole = text_behind(CountingTokenizer(TOKENIZERS[name]), behind, ids)
        assert whole.startswith(text)
        words = [token for token in ids if token not in decoder.special_ids]
        if words and words[-1] not in decoder.byte_ids:
            assert whole in (text, text + CUT_OFF)


@pytest.mark.parametrize("word", ["the", "☃", "\U0001f600", "\udcff"])
def test_however_long_a_text_gets_only_a_few_tokens_are_decoded_at_a_time(word: str) -> None:
    """The bound holds also for a text that never makes a whole character. Each event decoded all tokens again."""
    decoder = CountingTokenizer(TOKENIZERS["bytes"])
    places = {value: number for number, value in enumerate(unicode_bytes(), len(SPECIAL))}
    ids = [places[value] for value in word.encode(errors="surrogateescape")] * 200
    growing = GrowingText(decoder)
    text = "".join(growing.more([token]) for token in ids)
    assert decoder.decoded <= WINDOW + 1
    assert decoder.text(ids) in (text, text + CUT_OFF)
    assert KEPT < WINDOW


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=100)
@given(data=st.data())
def test_parts_of_a_response_by_the_weights_that_drew_them_add_up_to_it(name: str, data: st.DataObject) -> None:
    """A character may have bytes of two of them."""
    decoder = CountingTokenizer(TOKENIZERS[name])
    size = data.draw(st.integers(1, 40))
    ids = data.draw(st.lists(st.integers(0, decoder.size - 1), min_size=size, max_size=size))
    steps = data.draw(st.lists(st.integers(-1, 2), min_size=size, max_size=size))
    written = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    response = np.array(ids, np.int32)
    prompt, logp = response[:0], np.zeros(size, np.float32)
    found = spans(Transcript(prompt, response, np.array(written), logp, np.array(steps, np.int32)), decoder)
    assert decoder.text(ids) == "".join(span["text"] for span in found)
    drew = [
        (step if step >= 0 else None, True) if own else (None, False) for step, own in zip(steps, written, strict=True)
    ]
    assert drew == [(span["step"], span["trained"]) for span in found for _ in range(span["tokens"])]
    assert all((one["step"], one["trained"]) != (other["step"], other["trained"]) for one, other in pairwise(found))


def test_a_row_of_bytes_is_reported_once_it_has_ended() -> None:
    """One more byte may make all of it unreadable: each is shown for itself then."""
    decoder = CountingTokenizer(TOKENIZERS["fallback"])
    snow = [2 + value for value in "☃☃".encode()]
    word, broken = TOKENIZERS["fallback"].get_vocab()["a"], 2 + 0xFF
    growing = GrowingText(decoder)
    assert ["", "☃☃a"] == [growing.more(snow), growing.more([word])]
    growing = GrowingText(decoder)
    assert ["", "", CUT_OFF * 7 + "a"] == [growing.more(snow), growing.more([broken]), growing.more([word])]
