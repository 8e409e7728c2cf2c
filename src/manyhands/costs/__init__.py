"""Cost model: the costs of a network, traced without computing, and the performance of devices and links."""

from .exchanges import START, ExchangeGroup, Servers, all_gather, all_reduce, send
from .hardware import Chip, Link, blend, chip, link, make_chip
from .network import Network, NetworkPart, PassCost
from .trace import CannotTrace, pieces_of, trace
from .whole import fingerprint, one_piece

__all__ = [
    "Network",
    "NetworkPart",
    "PassCost",
    "trace",
    "pieces_of",
    "CannotTrace",
    "fingerprint",
    "one_piece",
    "Chip",
    "chip",
    "make_chip",
    "Link",
    "link",
    "blend",
    "ExchangeGroup",
    "all_reduce",
    "all_gather",
    "send",
    "Servers",
    "START",
]
