"""This room owns weights and optimizer state: it shards, moves, writes and reads them. It needs torch."""
