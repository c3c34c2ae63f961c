"""Tests of Roost: tidy, unit, sim, planted, parity."""
