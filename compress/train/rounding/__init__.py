"""Fake quantizers, masks and penalties: what training puts in the place of a weight."""
