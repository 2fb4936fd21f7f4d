"""The loop of one job: observe, plan, act, record. Calls the planner and the clients; knows no kopf."""
