"""What copies the names of other libraries and has no behaviour of its own: one table each."""
