"""Predicts memory, traffic and time of a training step for each layout, before a GPU is paid for."""
