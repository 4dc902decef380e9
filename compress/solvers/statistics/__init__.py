"""Statistics collected from calibration data: sums, ranges, Hessians."""
