"""Groups of options that passes share."""
