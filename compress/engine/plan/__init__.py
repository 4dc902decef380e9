"""The plan of a run: each layer's passes, checked before work."""
