"""Models: what a config.json means, what is refused, and how a state dict is taken apart."""
