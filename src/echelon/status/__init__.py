"""What each rank is doing, as others may see it."""
