"""Floor 13: the command ``echelon``, one file a command."""
