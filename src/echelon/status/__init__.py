"""Makes each rank's status visible to the launcher."""
