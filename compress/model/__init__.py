"""The parts of a model: layers, blocks, attentions, the calls between them, and the dataflow among them."""
