"""This room makes any training loop a trainer of a job. It needs no torch."""
