"""The text of a response while its tokens come, in pieces that add up to a beginning of the whole text.

Decoding everything again at each token takes as long for one response as its length squared. So only a few tokens are
decoded at each step: the new ones, those that did not make whole characters yet, and some before them, because decoders
look back: the first word of a text loses its space. What a later token could still change is held back:

* the first bytes of a character, which decode to one replacement character as long as they are the last;
* bytes that a tokenizer writes as tokens of their own, for want of better ones: its decoder takes a whole row of them
  for characters or for none, so nothing is known before the row has ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

CUT_OFF = "\ufffd"  # how the first bytes of a character decode
KEPT = 8  # tokens that are decoded again; no character has so many bytes
WINDOW = 24  # tokens at which the older ones are let go


class Decoder(Protocol):
    """special_ids: of tokens that are no text. byte_ids: of those that are one byte."""

    special_ids: frozenset[int]
    byte_ids: frozenset[int]

    def text(self, ids: list[int]) -> str: ...


class GrowingText:
    """Of one response."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._window: list[int] = []
        self._told = 0  # characters of the window's text

    def more(self, ids: Iterable[int]) -> str:
        """What further tokens add to what was told."""
        self._window += [token for token in ids if token not in self._decoder.special_ids]
        if not self._window or self._window[-1] in self._decoder.byte_ids:
            return ""
        text = self._decoder.text(self._window)
        told = len(text.removesuffix(CUT_OFF))
        piece = text[self._told : told]
        self._told = max(self._told, told)
        if len(self._window) > WINDOW:
            kept = self._window[-KEPT:]
            again = len(self._decoder.text(kept)) - (len(text) - self._told)
            if again > 0:
                self._window, self._told = kept, again
        return piece
