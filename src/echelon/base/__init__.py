"""Floor 0: errors, logging, the environment, devices; imports nothing of echelon."""
