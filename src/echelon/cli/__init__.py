"""Floor 11: the command ``echelon``, one file a command."""
