"""What makes any training loop a trainer of a job. Needs no torch."""
