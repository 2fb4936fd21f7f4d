"""Decide where every member should stand, which pods there should be, and what the status reports, without I/O."""
