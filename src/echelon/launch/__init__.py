"""Starts and monitors a run's processes, and reports how they ended."""
