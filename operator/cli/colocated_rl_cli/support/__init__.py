"""Make the support archive for a bug report, and scrub secrets out of it."""
