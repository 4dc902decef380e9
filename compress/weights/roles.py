"""Roles of the tensors that store a layer, as a report of sizes names their bytes, in the order of the report."""

from enum import StrEnum


class Role(StrEnum):
    """The purpose of a part's numbers."""

    CODES = "codes"
    SCALES = "scales"
    ZEROS = "zero points"
    OUTLIERS = "outliers: values"
    PLACES = "outliers: places"
    MASKS = "masks and shapes"
    SURVIVORS = "survivors of 2:4"
    FACTORS = "low-rank factors"
    BLOCKS = "blocks of codes and scales"
    RANGES = "ranges of inputs and outputs"
    DENSE = "dense weights"
