"""Rows of samples, batches of them, and who reads which."""
