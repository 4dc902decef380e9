"""`quantize` and its siblings: a request is checked, prepared and run as a job."""
