"""Streaming sessions: who owns which lease between turns, and how a turn ends."""
