"""Shows recorded runs: finds their folders, reads them, and writes the report page."""
