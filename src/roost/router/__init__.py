"""Routing requests to replicas: whose keys are where, and what else decides."""
