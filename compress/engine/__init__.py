"""A run: planned, walked block by block, trained, walked again."""
