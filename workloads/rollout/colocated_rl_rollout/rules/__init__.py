"""This room holds the rules about samples: their states, their staleness, how they resume. Pure."""
