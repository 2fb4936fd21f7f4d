"""Each lane calls one neighbour, engine or trainers, one call at a time, and journals calls that can't be repeated."""
