"""This room gets prompts and rewards: from processes of `tasks` over a socket, and from reward endpoints over HTTP."""
