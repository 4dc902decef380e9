"""The steps: optimizer, schedule, checkpoints, and how to stop."""
