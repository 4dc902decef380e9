"""What a number, and what a layer's weight, can become: grids, formats, and their words on disk."""
