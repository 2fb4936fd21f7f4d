"""The only code that calls an engine or a trainer. Translates their answers and errors, decides nothing."""
