"""Every sample, in exactly one state, on the job's volume. Only this room opens the database and writes batches."""
