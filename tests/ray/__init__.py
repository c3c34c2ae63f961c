"""Replicas on a real Ray Serve, on this machine."""
