"""The agent of a GPU pod: gate, journal, runner and drivers."""
