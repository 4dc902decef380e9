"""Writes a checkpoint block by block, with its record."""
