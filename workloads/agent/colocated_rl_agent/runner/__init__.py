"""This room starts processes in the GPU container and measures the device memory they hold.

`runner` is copied into an image that has none of our packages: standard library only. `runner_link` is the agent's end
of its socket.
"""
