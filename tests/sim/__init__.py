"""Simulator: the real control plane on a witness device, driven and broken by one seed."""
