"""What a model is made of: layers, blocks, attentions, the calls between them, and who feeds whom."""
