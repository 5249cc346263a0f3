"""Runs on several machines: one coordinator, one node per machine, and authenticated connections between them."""
