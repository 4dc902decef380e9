"""Settings of the whole test run."""

import torch

# Tests multiply small matrices: a second thread costs more than it gives, and ten times that on a busy machine.
torch.set_num_threads(1)
