"""The status of each rank, visible to the launcher."""
