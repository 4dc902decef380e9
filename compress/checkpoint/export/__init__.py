"""Exports checkpoints to other layouts."""
