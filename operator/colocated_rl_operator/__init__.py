"""The operator: observes a job's members, plans where each should stand, and acts."""
