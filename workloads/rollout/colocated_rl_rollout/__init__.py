"""The rollout controller: a persistent worker, with its store, rewards and gateway."""
