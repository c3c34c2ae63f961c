"""Ledger and prefix tree against plain models."""
