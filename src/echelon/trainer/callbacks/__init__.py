"""Callback events, and the built-in callbacks."""
