"""Planted bugs: protections taken away one source line at a time, to show that each is missed."""
