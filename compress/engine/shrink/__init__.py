"""Structure that is removed before the loop."""
