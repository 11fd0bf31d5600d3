"""Slow proofs that nothing is lost: `make torture`. A sample of each runs in `make test`."""
