"""Formats: each file holds one stored form of a weight."""
