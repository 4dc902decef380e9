"""Writes ONNX graphs whose compressed layers hold their codes, and compares ONNX Runtime with them."""
