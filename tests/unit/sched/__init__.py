"""Stages of the loop, one at a time, and the loop itself on the witness device."""
