"""Other people's code runs in this room: prompts, rewards and environments that a job names.

These modules run in container `rewards`, as another user, without the controller's volume and credentials. They import
the contract and one another. The controller imports `task_wire` alone, and trusts nothing that comes back.
"""
