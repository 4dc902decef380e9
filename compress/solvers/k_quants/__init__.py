"""K-quants: scales that are codes themselves, fitted to super-blocks of 256 weights and swept."""
