"""The parts of llama.cpp's files, for writing and for reading them: families, names, blocks, tokenizers."""
