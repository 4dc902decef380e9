"""One paper a file, and the skeletons that they share."""
