"""Trellis codes: the best path for a column, and the sweep around it."""
