"""A run on several machines: one coordinator, a node on each machine, authenticated connections between them."""
