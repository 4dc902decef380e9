"""Reads, writes, exports and seals model directories."""
