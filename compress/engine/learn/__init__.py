"""Training between two walks over the blocks."""
