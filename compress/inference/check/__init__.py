"""Compares a loaded model with torch and transformers."""
