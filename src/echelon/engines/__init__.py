"""Training engines: one class per way of distributing a model over the ranks, behind one abstract interface."""
