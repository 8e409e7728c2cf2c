"""The fixed sample: cells of every strategy and every kind of network that the test suite runs, with their outcome."""

from __future__ import annotations

from .cell import REFUSED, SAME
from .strategies import SPECS

_SAME: dict[str, tuple[str, ...]] = {
    "classic.mlp": tuple(name for name in SPECS if "context" not in name),
    "classic.residual_batch_norm": ("mirrored3", "sharded2"),
    "classic.unet": ("sharded2",),
    "classic.lstm": ("mirrored2", "ps1x2"),
    "classic.gru_packed": ("mirrored2",),
    "classic.gpt_tied": ("sharded2", "tensor2", "context2", "population"),
    "classic.gpt_ignore_index_counted": ("accumulate2", "mirrored3", "sharded2-gradients"),
    "classic.counted_part_without_valid_tokens": ("mirrored3", "sharded2"),
    "classic.gan": ("mirrored2", "sharded2"),
    "classic.weight_norm": ("mirrored2", "sharded2-optimizer"),
    "classic.dropout_everywhere": ("accumulate2", "mirrored2", "population"),
    "classic.vae": ("pipeline2",),
    "optimizer.noisy_sgd": ("single", "mirrored2"),
    "optimizer.AdamW": ("sharded2", "sharded2-optimizer", "ps1x2", "population"),
    "optimizer.parameter_groups": ("tensor2",),
    "optimizer.lookahead": ("mirrored2", "sharded2"),
    "optimizer.muon_and_adamw": ("sharded2-optimizer",),
    "optimizer.scheduler_StepLR": ("mirrored2",),
    "module.Conv2d": ("mirrored2", "tensor2"),
    "module.GroupNorm": ("sharded2",),
    "research.recurrent_memory": ("single",),
    "research.rotary_decoder": ("sharded2",),
    "research.gradient_accumulated_in_hook": ("sharded2",),
    "research.margin_of_angles": ("tensor2",),
    "research.reentrant_checkpoint": ("placed2",),
    "field.domains_by_strings": ("sharded2",),
    "field.rotary_cache_grows": ("mirrored2",),
    "field.compiled_submodule": ("mirrored2",),
    "transformers.llama": ("sharded2", "mirrored2*context2"),
    "transformers.t5": ("mirrored2",),
}
_REFUSED: dict[str, tuple[str, ...]] = {
    "classic.mlp": ("context2",),
    "classic.contrastive": ("accumulate2", "mirrored2", "sharded2", "ps1x2"),
    "classic.sum_instead_of_mean": ("mirrored3",),
    "research.recurrent_memory": ("pipeline2",),
    "research.full_backward_hooks": ("sharded2", "ps1x2"),
    "research.meta_learning": ("pipeline2",),
    "classic.sparse_embedding": ("mirrored2",),
    "field.vq_gan_two_optimizers": ("sharded2",),
}
SAMPLE: list[tuple[str, str, str]] = [
    *((network, strategy, SAME) for network, strategies in _SAME.items() for strategy in strategies),
    *((network, strategy, REFUSED) for network, strategies in _REFUSED.items() for strategy in strategies),
]
"""Network, strategy and outcome. Defects that were found and fixed are added here."""
