"""Runs compressed models: builds them, computes their layers, and checks them."""
