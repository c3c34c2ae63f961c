"""Simulator: the real scheduler and KV cache over a mock device (the witness); clients and faults by seed."""
