"""One update: its micro-steps, their weights, the optimizer and the scheduler."""
