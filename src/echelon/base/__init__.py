"""Errors, logging, environment variables and devices. This package imports no other echelon subpackage."""
