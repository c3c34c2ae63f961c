"""Tools: their definitions, the formats in which models call them, reasoning, and how both are read from an output."""
