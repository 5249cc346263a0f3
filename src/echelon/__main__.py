"""``python -m echelon``: the same as the command ``echelon``."""

from echelon.cli.main import main

if __name__ == "__main__":
    main()
