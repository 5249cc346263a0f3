"""Samplers, collators and data loaders of the Trainer."""
