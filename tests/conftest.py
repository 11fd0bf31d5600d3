"""What holds for every test: small tensors on one thread, random laws that repeat."""

from __future__ import annotations

import signal

import torch
from hypothesis import settings

# The tensors here are tiny: a second thread costs more than it brings, and other tests may run beside these.
torch.set_num_threads(1)

# A suite started in the background (nohup, a shell's &) inherits that Ctrl-C is ignored, and so would every process the
# tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("stockpot", deadline=None, derandomize=True)
settings.load_profile("stockpot")
