"""The gates of the job's engines, and what is sent through them. Only this room asks an engine for tokens."""
