"""A checkpoint written another way."""
