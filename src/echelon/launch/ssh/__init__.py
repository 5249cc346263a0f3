"""One command line on the machines of a hostfile, by ssh."""
