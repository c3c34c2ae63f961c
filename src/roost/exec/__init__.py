"""Execution: runs plans on a device, behind the step seam; the only code that keeps tensors between steps."""
