"""This package makes a torch loop a trainer, and has the default trainer."""
