"""The parts of `fit`: its target, the choice among recipes, time, and proof."""
