"""Runs one command line over ssh on all machines in a hostfile."""
