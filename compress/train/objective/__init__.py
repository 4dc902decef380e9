"""The losses of a training step, summed and weighted."""
