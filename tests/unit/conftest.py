"""Settings of tests that run in this process."""

import torch

# The workers of pytest-xdist, one for each core, would spend most of their time waiting for each other's threads.
torch.set_num_threads(1)
