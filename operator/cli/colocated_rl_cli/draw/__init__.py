"""Draw charts and tables from records: who held each GPU, how long a switch took. Pure."""
