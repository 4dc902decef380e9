"""Calibration text and tokens, and files of a teacher's logits on them."""
