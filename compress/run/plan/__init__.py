"""Which pass treats which layer, checked before work."""
