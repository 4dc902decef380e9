"""Calibration text and tokens, and files of what a teacher said of them."""
