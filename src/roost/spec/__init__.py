"""Speculation: the shape of a round, and later its drafters and acceptance."""
