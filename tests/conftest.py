"""What holds for every test: small tensors on one thread, random laws that repeat."""

from __future__ import annotations

import torch
from hypothesis import settings

# The tensors here are tiny: a second thread costs more than it brings, and other tests may run beside these.
torch.set_num_threads(1)

settings.register_profile("stockpot", deadline=None, derandomize=True)
settings.load_profile("stockpot")
