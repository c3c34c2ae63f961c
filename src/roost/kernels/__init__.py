"""Triton kernels: the operations of a step on a GPU, one to a file, each beside its launcher.

The torch reference of each is in `roost.layers` or named in its file. Launchers neither wait for the device nor read
from it, and allocate only with torch.empty, so that a CUDA graph can hold them.
"""
