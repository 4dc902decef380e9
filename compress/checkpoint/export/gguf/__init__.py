"""Writes GGUF files for llama.cpp and its kin from decided codes, and reads them back with gguf-py."""
