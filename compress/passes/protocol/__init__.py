"""The protocol of passes: stages, the sites they see, the layers they want, and their form in a recipe."""
