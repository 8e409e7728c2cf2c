"""Keras is imported here with its PyTorch backend, as manyhands.keras sees to when it comes first."""

import manyhands.keras  # noqa: F401
