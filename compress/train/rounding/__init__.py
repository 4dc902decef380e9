"""Fake quantizers, masks and penalties, through which weights are trained."""
