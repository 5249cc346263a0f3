"""``parity="exact"``: every batch is one global batch, split between any number of ranks."""
