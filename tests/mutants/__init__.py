"""Faults planted in training scripts and in the libraries below them, which ``echelon verify`` must find."""
