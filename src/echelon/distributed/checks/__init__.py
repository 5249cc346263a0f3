"""Checks that detect silent mistakes in training loops and report the line that causes them."""
