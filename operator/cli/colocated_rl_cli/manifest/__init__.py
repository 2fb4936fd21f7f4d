"""Write manifests, and validate them without a cluster."""
