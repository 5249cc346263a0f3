"""Callbacks: the events of a training, and those that come with echelon."""
