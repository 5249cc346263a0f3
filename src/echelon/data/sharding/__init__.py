"""Different ways to shard a loader across ranks."""
