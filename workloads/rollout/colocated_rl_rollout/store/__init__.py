"""This room keeps every sample in exactly one state, on the volume. Only it opens the database and writes batches."""
