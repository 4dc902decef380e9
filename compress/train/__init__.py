"""Training: fake-quantizers, losses, one loop."""
