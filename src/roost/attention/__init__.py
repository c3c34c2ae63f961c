"""Attention over the paged KV cache: the protocol, the registry of backends, and the backends."""
