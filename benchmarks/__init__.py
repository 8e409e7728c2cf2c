"""Benchmarks: manyhands and its peers alternate on the same work in one run."""
