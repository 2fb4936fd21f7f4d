"""This package is the command line for people who run jobs: `kubectl crlj`, and the same program as `colocated-rl`.

It owns nothing of a job: it reads objects from the API server, members' pages and logs, and changes only what anybody
with kubectl could. The cluster's RBAC decides who may do what; there is no other login.
"""
