"""Early stopping policies of studies, by name; each has its own file."""

from ...core import SettingsError
from .asha import ASHA
from .hyperband import Hyperband
from .median import Median
from .stopping import CONTINUE, PAUSE, STOP, Stopping, ToTheEnd

STOPPINGS: dict[str, type[Stopping]] = {"asha": ASHA, "hyperband": Hyperband, "median": Median}


def as_stopping(stop: Stopping | str | None) -> Stopping:
    """Return the stopping policy for a user's argument: a policy, its name, or None to train all trials to the end."""
    if stop is None:
        return ToTheEnd()
    if isinstance(stop, Stopping):
        return stop
    if stop not in STOPPINGS:
        raise SettingsError(f"stop must be one of {', '.join(STOPPINGS)}", got=repr(stop), remedy="choose one of them")
    return STOPPINGS[stop]()


__all__ = ["ASHA", "CONTINUE", "PAUSE", "STOP", "Hyperband", "Median", "Stopping", "ToTheEnd", "as_stopping"]
