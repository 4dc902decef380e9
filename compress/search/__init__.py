"""Choosing among recipes: sensitivity of layers, budgets, sweeps."""
