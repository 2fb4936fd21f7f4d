"""Speak to the API server and to members. No other code does; this room translates errors and decides nothing."""
