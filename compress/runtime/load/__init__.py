"""Building a model from a checkpoint."""
