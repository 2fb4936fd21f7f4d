"""Writes manifests and judges them without a cluster."""
