"""The ways to shard a loader over the ranks: who reads which samples."""
