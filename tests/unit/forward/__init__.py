"""The layout of a step and its lengths on the device."""
