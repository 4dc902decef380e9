"""Looks over this machine and its packages: what is there, what will be slow and why, and what is broken."""
