"""Errors, logging, the environment and devices; imports no other subpackage of echelon."""
