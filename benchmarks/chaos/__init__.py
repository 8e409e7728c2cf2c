"""Chaos runner: random faults against training, a study, parameter servers and serving, with their invariants."""
