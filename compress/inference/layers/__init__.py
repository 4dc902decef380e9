"""Layers that compute on compressed weights as they are stored."""
