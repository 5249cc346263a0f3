"""Parts of a recording that change the run on one process with which layouts are compared."""
