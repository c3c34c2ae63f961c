"""Grammars: what an output must match; matchers of llguidance by row, and masks of the tokens that they allow."""
