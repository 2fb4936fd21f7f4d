"""This room reads and writes the agent's files on volumes: journal, exports, batches."""
