"""Pinned libraries and what is known against them."""
