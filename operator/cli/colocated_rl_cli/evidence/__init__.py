"""Hold what was observed of a job (its objects, its log records) and what follows from it. Pure."""
