"""Measure what a switch moves on one GPU, beside what the device can do; `tests/gpu` has what must hold there."""
