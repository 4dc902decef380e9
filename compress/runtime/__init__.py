"""Layers that compute on what is stored, and how a model is put together from them."""
