"""How the parts of a block depend on each other, found by probing."""
