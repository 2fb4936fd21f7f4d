"""This room serves OpenAI's API to agents and other clients: sessions, turns, and the requests they may send."""
