"""Layers that compute on what is stored."""
