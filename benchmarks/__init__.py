"""Benchmarks: ours and the peers on the same work, by turns in one run."""
