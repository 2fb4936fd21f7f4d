"""Pictures and tables of what was seen: who held each GPU, what a switch took. Pure."""
