"""The gates of the job's engines, and the requests sent through them. Only this room asks an engine for tokens."""
