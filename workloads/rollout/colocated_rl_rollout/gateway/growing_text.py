"""Decode a response while its tokens arrive, in pieces that add up to a beginning of the whole text.

Decoding everything again at each token takes time quadratic in the response's length. So only a few tokens are decoded
at each step: the new ones, those that did not make whole characters yet, and some before them, because decoders look
back: the first word of a text loses its space. Text that a later token could still change is held back:

* the first bytes of a character, which decode to one replacement character as long as they are the last;
* bytes that a tokenizer writes as single tokens, for want of better ones: its decoder takes a whole row of them for
  characters or for none, so nothing is known before the row has ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

CUT_OFF = "\ufffd"  # the first bytes of a character decode to it
KEPT = 8  # tokens that are decoded again; no character has so many bytes
WINDOW = 24  # tokens at which the older ones are dropped


class Decoder(Protocol):
    """Decodes tokens. special_ids: tokens that are no text. byte_ids: tokens that are one byte."""

    special_ids: frozenset[int]
    byte_ids: frozenset[int]

    def text(self, ids: list[int]) -> str: ...


def last_words(decoder: Decoder, ids: Sequence[int]) -> list[int]:
    """Return the last tokens of a text, behind which others add what they add to the text; none where these could
    change its last character.
    """
    kept = [token for token in ids[-KEPT:] if token not in decoder.special_ids]
    is_whole = kept and kept[-1] not in decoder.byte_ids and not decoder.text(kept).endswith(CUT_OFF)
    return kept if is_whole else []


def text_behind(decoder: Decoder, words: list[int], ids: list[int]) -> str:
    """Return the text that tokens add to `last_words`: alone, some decoders drop the space with which it begins."""
    return decoder.text([*words, *ids])[len(decoder.text(words)) :]


class GrowingText:
    """Decodes one response as it grows. behind: `last_words` of the text that it continues."""

    def __init__(self, decoder: Decoder, *, behind: Iterable[int] = ()) -> None:
        self._decoder = decoder
        self._window = [*behind]
        self._returned = len(decoder.text(self._window))  # characters of the window's text that were returned

    def more(self, ids: Iterable[int]) -> str:
        """Return the text that further tokens add."""
        self._window += [token for token in ids if token not in self._decoder.special_ids]
        if not self._window or self._window[-1] in self._decoder.byte_ids:
            return ""
        text = self._decoder.text(self._window)
        whole = len(text.removesuffix(CUT_OFF))
        piece = text[self._returned : whole]
        self._returned = max(self._returned, whole)
        if len(self._window) > WINDOW:
            kept = self._window[-KEPT:]
            again = len(self._decoder.text(kept)) - (len(text) - self._returned)
            if again > 0:
                self._window, self._returned = kept, again
        return piece
