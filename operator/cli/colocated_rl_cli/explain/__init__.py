"""Explain why a job does not move, and what to do about it. Pure."""
