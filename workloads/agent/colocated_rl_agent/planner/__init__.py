"""What the agent does next, and why that is safe: a function of facts and target. Pure."""
