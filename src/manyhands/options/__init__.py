"""Options of `mh.fit`, `mh.tune` and `mh.ensemble`: one class per concern, passed as `options=`.

    mh.fit(task, epochs=3, options=mh.options.Checkpoints(save_every=100))

Arguments in Python, options of the command line and configuration files are derived from these classes.
"""

from .collect import collect, takes_options
from .studies import Algorithm, Budget, Combining, Execution, Selection
from .training import Checkpoints, Display, Equality, Logging, Recovery, Resources

__all__ = [
    "Checkpoints",
    "Logging",
    "Display",
    "Resources",
    "Recovery",
    "Equality",
    "Algorithm",
    "Budget",
    "Selection",
    "Execution",
    "Combining",
    "collect",
    "takes_options",
]
