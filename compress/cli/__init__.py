"""Arguments in, tables out."""
