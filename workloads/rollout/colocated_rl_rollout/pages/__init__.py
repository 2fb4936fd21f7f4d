"""This room serves batches to agents, and samples and figures to people. It reads the store and changes nothing."""
