"""Run the loop of one job: observe, plan, act, record. It calls the planner and the clients, and knows no kopf."""
