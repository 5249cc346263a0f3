"""From what the ranks noted to what is wrong; pure functions, no processes."""
