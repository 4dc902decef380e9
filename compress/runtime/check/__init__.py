"""A loaded model held against torch and transformers."""
