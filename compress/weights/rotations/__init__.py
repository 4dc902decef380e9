"""Orthogonal matrices that spread outliers over channels: Hadamard matrices of many orders, and products with them."""
