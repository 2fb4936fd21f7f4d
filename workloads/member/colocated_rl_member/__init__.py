"""This package is a member's end of the operator's connection, shared by the agent and the rollout controller.

`server` holds a member's ports, `fence` the epochs it accepts, `tls` authenticates callers, `room` bounds their number,
and `data` reaches other members' data ports. A member's own behaviour comes in as callables.
"""
