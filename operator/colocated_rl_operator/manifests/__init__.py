"""Render the objects of a job from its spec. The package is pure."""
