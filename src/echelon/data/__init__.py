"""Which sample goes to which rank, and when."""
