"""Drafters: who proposes tokens, trees of them, and which path the target accepts."""
