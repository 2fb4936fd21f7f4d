"""The only code that talks to an engine or a trainer. Each driver translates its neighbour's errors into `base`'s."""
