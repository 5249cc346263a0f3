"""The ways to shard a loader over the ranks."""
