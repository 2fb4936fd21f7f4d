"""What the agent reads and writes on volumes: journal, exports, batches."""
