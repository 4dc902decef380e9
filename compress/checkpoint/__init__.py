"""Model directories: read, written, exported, sealed."""
