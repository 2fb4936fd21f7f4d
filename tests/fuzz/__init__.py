"""These targets feed each part with bytes of strangers, which may do nothing that the part does not document. `make
fuzz` searches for others.

A target is a function that takes bytes and raises for whatever must not happen. Its corpus, in `corpus/`, holds small
examples of what the real other side sends, and each input that once broke something: `make test` replays all of them.
"""
