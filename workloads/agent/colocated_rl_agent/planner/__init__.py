"""The planner chooses the agent's next safe action as a pure function of facts and target."""
