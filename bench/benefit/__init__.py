"""These programs measure what a whole job saves by rollout that goes on across steps, and run trl beside it."""
