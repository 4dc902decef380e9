"""Directories of a model: found, read, written block by block, described."""
