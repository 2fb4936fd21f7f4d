"""This room knows the gates of the job's engines. It alone asks an engine for tokens."""
