"""What can be learned from data: sums, ranges, Hessians."""
