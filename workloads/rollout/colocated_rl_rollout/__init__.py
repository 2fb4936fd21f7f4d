"""This package is the rollout controller: a persistent worker, with its store, rewards and gateway."""
