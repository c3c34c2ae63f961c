"""The shape of a speculative round."""
