"""TEMPORARY stand-ins until soup/ and pool/ are merged."""

import functools
from safetensors.torch import save
from stockpot import files
from stockpot.soup import record as r, Soup
from stockpot.pool.facts import PoolFacts
import stockpot.pool.pool as pp
import torch

if not hasattr(r, "write"):

    def write(folder, soup, max_shard, root=None):
        if soup.statistics is not None:
            files.write_bytes(
                folder / r.STATISTICS, save({k: v.contiguous() for k, v in soup.statistics.items()}), root
            )
        files.write_json(folder / r.RECORD, r.encode(soup, soup.pool.digests(), None, max_shard), root)

    r.write = write
    from stockpot.pool import Pool

    old = r._opened
    r._opened = lambda sources, options, given: (
        sources if isinstance(sources, Pool) else old(sources, options, given=given)
    )
if not hasattr(PoolFacts, "distances"):

    class D:
        def __init__(s, K):
            s.pairs = torch.ones(K, K).fill_diagonal_(0)
            s.to_mean = torch.ones(K)
            s.norms = torch.ones(K)

        def outlier(s):
            return None

    PoolFacts.distances = property(lambda self: D(len(self.digests)))
