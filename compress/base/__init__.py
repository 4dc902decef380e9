"""The machine and who sits at it: ranks, devices, memory, progress, the terminal, files that a person names."""
