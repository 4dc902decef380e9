"""Modules of torch that hold weights without calling layers, taken apart into linear layers."""
