"""Multi-machine runs: one coordinator, one node per machine, and authenticated connections between them."""
