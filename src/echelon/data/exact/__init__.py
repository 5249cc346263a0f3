"""``parity="exact"``: every batch is one global batch, cut for any number of ranks."""
