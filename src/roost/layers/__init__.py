"""Layers: the operations models are made of, as plain torch functions; the reference for every faster one."""
