"""The bundle for a bug report, and what is scrubbed out of it."""
