"""Reads a model directory: configuration, headers, tensors."""
