"""The rollout controller: persistent worker, store, rewards and gateway."""
