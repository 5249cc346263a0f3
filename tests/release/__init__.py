"""The files of a release: built twice, checked, and tried in an empty environment. Run by ``make release-check``."""
