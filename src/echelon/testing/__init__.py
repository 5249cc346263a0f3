"""For the tests of those who extend echelon."""
