"""The objects of a job, rendered from its spec. Pure."""
