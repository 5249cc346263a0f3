"""``parity="exact"``: each batch is one global batch, which can be split across any number of ranks."""
