"""The command line of people who run jobs: `kubectl crlj`, and the same program as `colocated-rl`.

It owns nothing of a job: it reads what the API server, the members' pages and their logs say, and changes only what
anybody with kubectl could. Who may do what is decided by the cluster's RBAC; there is no other login.
"""
