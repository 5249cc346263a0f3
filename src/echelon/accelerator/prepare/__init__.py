"""``prepare``: models, loaders and what is compiled."""
