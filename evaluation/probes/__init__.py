"""Windows made to be asked: the original's own answers, facts to recall, tool calls."""
