"""Pages of `docs/` that more than one part of the system is in: `PYTHONPATH=tests python -m documents [--check]`."""
