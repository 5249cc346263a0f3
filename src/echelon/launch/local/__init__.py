"""Starts, monitors and stops the processes on one machine."""
