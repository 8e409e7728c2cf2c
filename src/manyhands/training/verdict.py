"""Verdict: whether a strategy takes the same steps as one device, and why not."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..core import StrategySpec

RANDOM = "the step draws random numbers from a separate generator, which differ on every replica"
SAMPLES = (
    "use an operation of each sample by itself (LayerNorm or GroupNorm in place of batch statistics), torch's own "
    "BatchNorm, whose statistics are synchronized, or a strategy that does not split batches"
)
BUFFER = "make its update a mean over samples, keep it out of forward, or use a strategy that does not split batches"
NUMBER = (
    "register it as a buffer (register_buffer), which is synchronized, pass it as an input, or use a strategy that "
    "does not split batches; if it is only recorded, verify=False skips the comparison"
)
PARAMETERS = (
    "change parameters in the optimizer's step (nn.Embedding without max_norm, for instance), or use a strategy that "
    "does not split batches and weights"
)
OTHER = "use another strategy, mh.Mirrored() say, and report this network: the strategy should have refused it"
MICRO = (
    'batch_stats="micro" takes them of each micro-batch, as a loop in plain PyTorch does; GroupNorm or LayerNorm need '
    "none; accumulate=1 and microbatches=1 do not split a batch"
)


@dataclass(frozen=True)
class Verdict:
    """The result of comparing a strategy's steps with one device: equal, or where they differ and why.

    >>> bool(Verdict("equal", StrategySpec()))
    True
    """

    outcome: str
    """"equal", "different", or "not verified" where the two could not be compared."""
    spec: StrategySpec
    first: str = ""
    """The first parameter (or buffer, or loss) that differs."""
    error: float = 0.0
    """The largest relative difference there, or overall where all are equal."""
    why: str = ""
    remedy: str = ""
    notes: tuple[str, ...] = field(default=())

    @property
    def equal(self) -> bool:
        """Whether the steps were compared and are equal."""
        return self.outcome == "equal"

    def __bool__(self) -> bool:
        return self.equal

    def __str__(self) -> str:
        notes = "".join(f"\n  note: {note}" for note in self.notes)
        remedy = f"; {self.remedy}" if self.remedy else ""
        if self.equal:
            summary = f"equal: {self.spec} takes the same first steps as one device"
            return f"{summary} (largest difference {self.error:.1e}){notes}"
        if self.outcome == "not verified":
            return f"not verified: {self.spec} could not be compared with one device, because {self.why}{remedy}{notes}"
        return f"different: under {self.spec}, {self.first} differs by {self.error:.1e}: {self.why}{remedy}{notes}"
