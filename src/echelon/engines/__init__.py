"""Training engines: each class distributes a model across ranks in a different way, behind one abstract interface."""
