"""This room is the default trainer: GRPO on one sealed batch at a time."""
