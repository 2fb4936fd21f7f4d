"""This room is the reference as a stage of rollout: a frozen model that scores the samples that rollout has finished.

It has pods of its own, or runs beside engines. It never changes, so it takes no part in any switch and is no member of
its job: it receives nothing but samples to score. It loads the job's model as trainers do, and computes with their code
(`forward`).
"""
