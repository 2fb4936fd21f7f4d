"""Errors, output and YAML with positions, for all commands."""
