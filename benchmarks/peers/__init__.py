"""Peers: other libraries on the same work, each in its own environment, beside the hand-written loops."""
