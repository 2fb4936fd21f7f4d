"""The agent of a GPU pod: it takes the pod's engine and trainers up and down the ladder, and owns the way in.

planner    what to do next, from what is known and what the operator wants (pure)
gate       the data path: open or closed, counting
drivers    the only code that calls an engine or a trainer
lanes      the engine's process and calls; the trainer ranks' processes and requests
files      journal, exports and batches: what outlives the process or changes hands
runner     processes and devices of the GPU container; the runner itself is copied there
agent      the loop: look, choose, act, report
"""
