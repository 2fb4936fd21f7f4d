"""The agent of a GPU pod takes its engine and trainers up and down the ladder, and owns the gate to the engine.

planner    chooses the next actions from the pod's view and the operator's target (pure)
gate       the data path: open or closed, counting
drivers    the only code that calls an engine or a trainer
lanes      the engine's process and calls; the trainer ranks' processes and requests
files      journal, exports and batches: files that outlive the process or pass between processes
runner     processes and devices of the GPU container; the runner itself is copied there
agent      the loop: look, choose, act, report
"""
