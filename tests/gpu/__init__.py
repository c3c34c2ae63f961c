"""What only a device can show; skipped where there is none."""
