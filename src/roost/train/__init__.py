"""Training of draft heads: answers of the target itself, and a head that learns to guess them."""
