"""The way in: every request for the pod's engine passes here, is counted, and is refused while the gate is closed."""
