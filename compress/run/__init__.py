"""The loop over blocks."""
