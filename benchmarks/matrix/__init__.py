"""The matrix of networks and strategies: does every strategy give the result of one device, or refuse beforehand?

`python -m benchmarks.matrix` trains every network on one device by a plain PyTorch loop, then under every strategy, and
compares losses, parameters and buffers. See docs/equality.md.
"""
