"""Settings of the parity tests."""

import torch

torch.set_num_threads(1)  # tiny tensors: more threads only cost
