"""Whether a trainer speaks the trainer protocol: `python3 -m colocated_rl_trainer.conformance --model DIR -- COMMAND`.

Standard library and pydantic only, as is the helper. It asks real processes over their sockets, as an agent does.
"""
