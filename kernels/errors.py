"""The errors that kernels raise, and the bases of all others of the project (`compress.base.errors`)."""


class CompressError(Exception):
    """Work that began could not be finished. The command line exits with 1."""


class InputError(CompressError, ValueError):
    """Bad input, found before work starts. The command line exits with 2."""
