"""Floor 1: what the user chose, and where each choice came from."""
