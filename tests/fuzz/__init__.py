"""What strangers' bytes may do to each part: nothing that the part does not state. `make fuzz` looks for others.

A target is a function that takes bytes and raises for whatever must not happen. Its corpus, in `corpus/`, holds small
examples of what the real other side sends, and each input that once broke something: `make test` replays all of them.
"""
