"""This package is the contract between operator, members, trainers and people.

It needs only the standard library and pydantic.

Each module imports only those before it: `rungs` (words of a switch), `wire` (base of all messages), `facts` (what
members report), `ladder` (the order of a switch), `job` (the resource), `member_wire` (what operator and members say to
each other). Beside them: `gate_wire` (rollout controller and agent), `trainer_wire` (agent and trainer), `batch` and
`weights` (the two kinds of files that change hands), `names` (every name that two processes must agree on).
"""

__version__ = "0.1.0.dev0"
