"""The helper that makes a torch loop a trainer, and the default trainer."""
