"""Reading a model directory: configuration, headers, tensors."""
