"""Forecast of a run: what `compress plan` tells from shapes alone."""
