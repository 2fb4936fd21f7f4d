"""Rules about samples: what they are, how stale they may be, how one goes on after an interruption. Pure."""
