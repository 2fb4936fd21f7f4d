"""Figures of a whole run on this machine. Nothing here passes or fails: machines differ and are noisy."""
