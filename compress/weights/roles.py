"""Roles of the tensors that a layer is stored as: what a report of sizes calls their bytes, in its order."""

from enum import StrEnum


class Role(StrEnum):
    """What the numbers of a part are for."""

    CODES = "codes"
    SCALES = "scales"
    ZEROS = "zero points"
    OUTLIERS = "outliers: values"
    PLACES = "outliers: places"
    MASKS = "masks and shapes"
    SURVIVORS = "survivors of 2:4"
    FACTORS = "low-rank factors"
    RANGES = "ranges of inputs and outputs"
    DENSE = "dense weights"
