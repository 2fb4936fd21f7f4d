"""OpenAI's API for agents and other clients: sessions, turns, and what they may ask for."""
