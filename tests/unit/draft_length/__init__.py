"""The policy that chooses how many tokens to draft."""
