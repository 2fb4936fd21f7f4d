"""Where every member should stand, which pods there should be, and what the status says of it. Pure."""
