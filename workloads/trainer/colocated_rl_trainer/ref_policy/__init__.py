"""The reference on devices of its own: a frozen model that says the log-probabilities of what rollout has finished.

It never changes, so it takes no part in any switch, and is no member of its job: nobody tells it anything but what to
compute. It loads the job's model as trainers do, and computes with their code (`forward`).
"""
