"""Runs that are quantized, evaluated and held against each other or a budget: the one storey that does both."""
