"""Floor 6: which sample goes to which rank, and when."""
