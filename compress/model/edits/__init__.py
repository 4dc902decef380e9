"""Edits of a model that can be undone and stored: fold, permute, keep, drop."""
