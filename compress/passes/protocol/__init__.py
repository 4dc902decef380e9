"""What a pass is: its stages, the sites it sees, the layers it wants, and how a recipe writes it down."""
