"""Quantized numbers and compressed weights: grids, formats, and their descriptions on disk."""
