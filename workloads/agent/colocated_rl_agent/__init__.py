"""The agent of a GPU pod: it takes the pod's engine and trainers up and down the ladder, and owns the way in.

facts      what to do next, from what is known and what the operator wants: the action table (pure)
views      what is known, and what each confirmed effect means (pure)      actions   what can be done (pure)
agent      the loop: look, choose, act, tell          climb      how long each rung took
engine     the engine's process and calls             trainers   the trainer ranks' processes and requests
gate       the data path: open or closed, counting    dialects   what the engine's routes take and say (pure)
journal    calls that can't be repeated, across restarts
drivers    the only code that talks to an engine or a trainer
runner     entry point of the GPU container, copied there; `runner_link` is this end of its socket
devices    memory of the GPUs, and what it must be    problems   why the pod comes no nearer to its target
exports, batches, probe   files that change hands, and whether they are what they should be
"""
