"""Finds the dependences among the parts of a block by probing it."""
