"""The trainer that jobs get by default: GRPO on one sealed batch at a time."""
