"""What the device side does between logits and tokens, against slow and plain references."""
