"""Builds a model from a checkpoint."""
