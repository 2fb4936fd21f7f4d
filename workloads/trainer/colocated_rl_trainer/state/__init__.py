"""Weights and optimizer state: sharded, moved between device and host, written and read. Needs torch."""
