"""The controller's side of prompts and rewards: processes of `tasks` over a socket, and reward endpoints over HTTP."""
