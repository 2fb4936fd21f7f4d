"""What the controller shows: batches for agents, samples and figures for people. Reads the store, changes nothing."""
