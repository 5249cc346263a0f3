"""Provides the names in ``accelerate.commands``, implemented by echelon."""
