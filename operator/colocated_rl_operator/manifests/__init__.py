"""Render the objects of a job from its spec. Pure."""
