"""The gate counts every request for the pod's engine and refuses it while the gate is closed."""
