"""Data loading: assigns samples to ranks and steps."""
