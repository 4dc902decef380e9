"""The mathematics of the methods, as functions of tensors."""
