"""Processes in the GPU container and what they hold of its devices.

`runner` is copied into an image that has none of our packages: standard library only. `runner_link` is the agent's end
of its socket.
"""
