"""Steps of generating on a CPU: blocks of a decoder in one call, where their form is known."""
