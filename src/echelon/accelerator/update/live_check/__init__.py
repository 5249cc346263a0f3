"""``verify_every``: checks every N-th update of a live run against the update that one process would make on the same batch."""
