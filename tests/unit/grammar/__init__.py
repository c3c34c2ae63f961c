"""Units of grammars: what may be said, how it is compiled."""
