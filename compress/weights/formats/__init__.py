"""One stored form of a weight a file."""
