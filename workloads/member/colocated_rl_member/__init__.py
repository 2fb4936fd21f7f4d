"""A member's end of the operator's connection, shared by the agent and the rollout controller."""
