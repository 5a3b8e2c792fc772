"""One thread a test process: the models are tiny, and threads waiting for each other cost more than they do."""

import torch

torch.set_num_threads(1)
