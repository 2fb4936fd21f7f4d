"""Run the operator, which observes a job's members, plans where each should stand, and acts."""
