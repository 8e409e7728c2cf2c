"""Cost model: FLOPs, bytes and memory of a network, traced without computing; performance of devices and links."""

from .exchanges import START, ExchangeGroup, Servers, all_gather, all_reduce, send
from .hardware import Chip, Link, blend, chip, device_names, link, make_chip
from .network import Network, NetworkPart, PassCost
from .trace import CannotTrace, trace
from .whole_network import fingerprint, one_piece

__all__ = [
    "Network",
    "NetworkPart",
    "PassCost",
    "trace",
    "CannotTrace",
    "fingerprint",
    "one_piece",
    "Chip",
    "chip",
    "device_names",
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
