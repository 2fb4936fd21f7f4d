"""This room checks a trainer: `python3 -m colocated_rl_trainer.conformance --model DIR -- COMMAND`.

Like the helper it needs the standard library and pydantic only. It calls real processes over their sockets, as an agent
does.
"""
