"""The contract between operator, members, trainers and people. Standard library and pydantic only.

`job` is the resource, `ladder` the order of a switch, `member_wire` what operator and members say to each other,
`gate_wire` what the rollout controller and an agent say, `trainer_wire` what an agent and a trainer say, `batch` and
`weights` the two kinds of files that change hands, `names` every name that two processes must agree on.
"""

__version__ = "0.1.0.dev0"
