"""Parallel: the processes that share one model under tensor parallelism, and what travels between them."""
