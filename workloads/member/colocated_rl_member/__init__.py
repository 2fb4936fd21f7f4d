"""A member's end of the operator's connection, shared by the agent and the rollout controller.

`server` holds the ports of a member, `fence` the epochs it accepts, `tls` who may speak to it, `room` how many may,
`data` how members reach one another's data ports. No member's own behaviour is here: it comes in as callables.
"""
