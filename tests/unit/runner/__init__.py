"""What a device must hold."""
