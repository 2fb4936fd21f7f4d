"""Define errors, output formats and YAML with positions for all commands."""
