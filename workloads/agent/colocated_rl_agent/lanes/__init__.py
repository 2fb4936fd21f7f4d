"""One lane for each neighbour, engine and trainers: one call at a time, journaled where it can't be repeated."""
