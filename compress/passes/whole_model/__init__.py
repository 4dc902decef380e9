"""Passes that edit the whole model before the plan is made: rotation, and structure that is removed."""
