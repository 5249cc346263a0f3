"""Checks of plain PyTorch loops: mistakes that train on, found and named at their line."""
