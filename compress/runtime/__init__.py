"""Compressed models that run: how they are built, what their layers compute, and how they are checked."""
