"""Learned times of steps: of decode and verify rounds, and of the prompt tokens beside them; no torch."""
