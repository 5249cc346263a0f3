"""Finds a run's first error from how its ranks ended."""
