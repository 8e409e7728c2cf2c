"""Parser for descriptions of a cluster in a line of text, such as "8 hosts x 8 H100, 400Gb/s InfiniBand, $2/h".

Each feature (devices, price, network, hosts) is found anywhere in the line and removed from it. A word that is left
over is an error, so that nothing that the user wrote is ignored.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from ..core import SettingsError
from ..costs import device_names

REMEDY = 'write for example "8 hosts x 8 H100, 400Gb/s InfiniBand, $2/h", or pass a TOML file'
USUAL_PER_HOST = 8
"""Assumed number of devices per host if a line gives a larger number of devices, and no number of hosts."""
_NUMBER = r"\d+(?:[.,]\d+)?"
_HOST = r"(?:hosts?|nodes?|servers?|machines?|instances?|boxe?s?)"
_DEVICE = r"(?:devices?|gpus?|cards?|accelerators?)"
_CURRENCIES = {"$": "$", "usd": "$", "€": "€", "eur": "€", "£": "£", "gbp": "£"}
_MONEY = r"(?:\$|€|£|USD|EUR|GBP)"
_PRICE = re.compile(
    rf"(?:(?P<before>{_MONEY})\s*(?P<price>{_NUMBER})|(?P<other>{_NUMBER})\s*(?P<after>{_MONEY}))"
    rf"\s*(?:(?:/|per|a|an|each)\s*(?P<of>{_DEVICE}|{_HOST})?[\s-]*(?:/|per|a|an)?\s*(?:h|hr|hour)s?\b|/\s*h\b)"
    rf"(?:\s*(?:/|per|a|each)\s*(?P<each>{_DEVICE}|{_HOST}))?"
    rf"|(?P<plain>{_NUMBER})\s*/\s*h(?:our)?\b",
    re.IGNORECASE,
)
_RATE = re.compile(
    rf"(?:(?P<rails>\d+)\s*x\s*)?(?P<rate>{_NUMBER})[-\s]*(?P<unit>[GgMmTt])"
    r"(?P<what>i?[bB](?:its?|ytes?)?\s*(?:/\s*s(?:ec)?|ps)|igab(?:it|yte)s?(?:\s*/\s*s|ps)?|b(?:it)?|bE|ps)?(?!\w)"
    rf"(?i:\s*(?:/|per|a|for each|each)\s*(?P<scope>{_DEVICE}|{_HOST}|nics?))?",
)
"""Bandwidth of a network. Bytes need "per second", because "80GB" alone is the memory of a device."""
_PER_DEVICE = re.compile(rf"\b(?:per|each|a)\s+{_DEVICE}\b", re.IGNORECASE)
_NETWORKS = {
    "ib": "InfiniBand", "infiniband": "InfiniBand", "ndr": "InfiniBand", "hdr": "InfiniBand", "edr": "InfiniBand",
    "roce": "RoCE", "rocev2": "RoCE", "efa": "RoCE",
    "ethernet": "Ethernet", "eth": "Ethernet", "tcp": "Ethernet", "gbe": "Ethernet",
}  # fmt: skip
_INSIDE = re.compile(
    r"\b(?P<kind>NVLink|NVSwitch|PCIe|PCI-?e|PCI Express)\s*(?:gen\s*)?(?P<version>[1-6])?(?:\.0)?\b", re.I
)
_FORM = re.compile(r"\bSXM\s*-?\s*[2-6]?\b", re.I)
_MEMORY = re.compile(r"[-(\s]*(?P<gigabytes>\d+)\s*G(?:i?B)?\b(?!\s*(?:/|p|it))\)?", re.I)
_FILLERS = {
    "per", "each", "a", "an", "over", "network", "networking", "between", "and", "with", "of", "on", "in", "the", "for",
    "at", "x", "by", "via", "using", "interconnect", "gpu", "gpus", "device", "devices", "nic", "nics", "hosts", "host",
    "nodes", "node", "cluster", "nvidia", "amd", "tesla", "geforce", "instinct", "intel", "hgx", "sxm",
}  # fmt: skip


@dataclass
class _ClusterLine:
    """A line of text from which the parser removes one feature (devices, price, network, hosts) after the other."""

    text: str
    whole: str = field(init=False)

    def __post_init__(self) -> None:
        self.whole = self.text

    def take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Find the first match of `pattern`, remove it from the text and return it; None if there is none."""
        found = pattern.search(self.text)
        if found is not None:
            self.text = f"{self.text[: found.start()]} , {self.text[found.end() :]}"
        return found

    def error(self, rule: str, got: str, remedy: str = REMEDY) -> SettingsError:
        """Return an error with the rule, the part of the line that breaks it, and the whole line."""
        return SettingsError(rule, got=f"{got} in {self.whole!r}" if got != self.whole else repr(got), remedy=remedy)


def parse_cluster(text: str) -> dict[str, Any]:
    """Return the settings that a line of text describes, by name, for `Cluster.from_dict`.

    Raises:
        SettingsError: The line has no devices, a word without a meaning, or numbers that contradict each other.

    >>> parse_cluster("64 A100 SXM 80GB, 8 per node, 8x200Gb/s, 16 €/h per host")
    {'device': 'A100', 'hosts': 8, 'per_host': 8, 'gbits': 1600.0, 'price': 2.0, 'currency': '€'}
    """
    line = _ClusterLine(_normal(text))
    if re.search(r"(?<![\w.])-\s*\d", line.text):
        raise line.error("the numbers of a cluster must be above 0", text.strip())
    found = next((match for pattern in _SHAPES if (match := line.take(pattern)) is not None), None)
    if found is None:
        raise line.error("a cluster must be written as hosts times devices", text.strip())
    money, rate = line.take(_PRICE), line.take(_RATE)
    device = _device(line, found["name"], found["memory"])
    values: dict[str, Any] = {**device, **_shape(line, found.groupdict())}
    per_host = values["per_host"]
    if rate is not None:
        values |= _network(rate)
        if line.take(_PER_DEVICE) is not None:
            values["per_device"] = True
    if money is not None:
        values |= _price(money, per_host)
    for word in re.findall(r"[^\W_]+", line.text):
        if word.lower() in _NETWORKS:
            values["network"] = _NETWORKS[word.lower()]
        elif word.lower() not in _FILLERS:
            raise line.error("a cluster must be written as hosts, devices, a network and a price", repr(word))
    return values


def _normal(text: str) -> str:
    """Return a line with "x" for all signs of multiplication, and with commas in place of brackets."""
    text = re.sub("[\u00d7\u2715\u2716\u2217*]", "x", text)  # signs of multiplication
    text = re.sub(r"[()\[\];:@]", " , ", text)
    return re.sub(r"(?<=\d)\s*x\s*(?=\D)", " x ", re.sub(r"\s+", " ", text)).strip()


def _number(text: str) -> float:
    return float(text.replace(",", "."))


_CHIP = (
    r"(?:(?:NVIDIA|AMD|Tesla|GeForce|Instinct|Intel)\s+)*"
    r"(?P<name>(?:RTX|GTX|MI|Radeon)[\s-]*\d+\s*(?:Ti|Super|XTX?|X)?\b|[A-Za-z]{1,3}\d+[A-Za-z]*(?![A-Za-z0-9])"
    r"|CPUs?\b|cores?\b)"
    r"(?:(?:[\s,-]*SXM\s*-?[2-6]?)?[\s,-]*(?P<memory>\d+)\s*GB\b(?!\s*(?:/|p)))?"
)
_SHAPES = (
    # 4 DGX H100
    re.compile(rf"\b(?P<hosts>\d+)\s*x?\s*(?:DGX|HGX)[\s-]*{_CHIP}", re.I),
    # 8 hosts x 8 H100, 8 nodes with 8 A100 each, 8 x 8 x H100, 8 nodes, 8 H100 per node
    re.compile(
        rf"\b(?P<hosts>\d+)\s*(?:{_HOST}\s*(?:,|x|of|with|each with|having)?|x|of)\s*(?P<count>\d+)\s*x?\s*{_CHIP}",
        re.I,
    ),
    # 64 H100
    re.compile(rf"\b(?P<devices>\d+)\s*x?\s*{_CHIP}", re.I),
)
_PER_HOST = re.compile(
    rf"\b(?P<per>\d+)\s*(?:{_DEVICE}\s*)?(?:per|a|/|on each|in each)\s*{_HOST}|\b(?:per|each)\s+{_HOST}", re.I
)
_ON_HOSTS = re.compile(rf"\b(?:on|in|over|across)\s*(?P<hosts>\d+)\s*{_HOST}|\b(?P<listed>\d+)\s*{_HOST}", re.I)


def _shape(line: _ClusterLine, parts: dict[str, str | None]) -> dict[str, Any]:
    """Return the numbers of hosts and of devices per host, as settings.

    `parts` has the numbers that were matched together with the devices; others are removed from the line.
    """
    per, on = line.take(_PER_HOST), line.take(_ON_HOSTS)
    if parts.get("hosts"):
        return {"hosts": int(str(parts["hosts"])), "per_host": int(parts.get("count") or USUAL_PER_HOST)}
    devices, values = int(str(parts["devices"])), {}
    per_host = int(per["per"]) if per is not None and per["per"] else None
    hosts = int(on["hosts"] or on["listed"]) if on is not None else None
    if per_host is None and hosts is None and devices > USUAL_PER_HOST and _is_gpu(str(parts["name"])):
        per_host = USUAL_PER_HOST
        values["assumed"] = (f"{per_host} devices in a host (write for example '16 per host')",)
    elif per_host is None:
        per_host = devices // hosts if hosts else devices
    if not per_host or devices % per_host or (hosts is not None and hosts * per_host != devices):
        given = f"{devices} devices, {f'{hosts} hosts, ' if hosts else ''}{per_host} per host"
        raise line.error(
            "the number of devices must be hosts times devices per host", given, 'write for example "2 hosts x 6 H100"'
        )
    return {**values, "hosts": devices // per_host, "per_host": per_host}


def _is_gpu(name: str) -> bool:
    return not name.lower().startswith(("cpu", "core"))


def _device(line: _ClusterLine, name: str, gigabytes: str | None) -> dict[str, Any]:
    """Return the settings of a device: its name in the catalogue, and the link between devices of a host if given.

    Its form factor, memory and link are removed from the line.
    """
    values: dict[str, Any] = {}
    known = {re.sub(r"[\s-]", "", one).upper(): one for one in device_names()}
    plain = "CPU" if not _is_gpu(name) else re.sub(r"[\s-]", "", name).upper()
    form, inside, memory = line.take(_FORM), line.take(_INSIDE), line.take(_MEMORY)
    size = gigabytes or (memory and memory["gigabytes"])
    if plain not in known:
        raise line.error(f"a device must be one of the catalogue ({', '.join(known.values())})", repr(name))
    kind = (inside["kind"] if inside is not None else "").lower()
    if kind.startswith("pci") and form is None and f"{plain}PCIE" in known:
        plain = f"{plain}PCIE"
    elif inside is not None and kind != "nvswitch" and (kind.startswith("pci") or inside["version"]):
        values["inside"] = f"{'PCIe' if kind.startswith('pci') else 'NVLink'} {inside['version'] or 4}"
    if size:
        plain = _with_memory(line, plain, int(size), known)
    return {"device": known[plain], **values}


def _with_memory(line: _ClusterLine, plain: str, gigabytes: int, known: dict[str, str]) -> str:
    """Return the key in `known` of a device's variant with so much memory; raise SettingsError if there is none."""
    variants = {round(memory / 1e9): one for one, memory in device_names().items() if one.split("-")[0] == known[plain]}
    usual = round(device_names()[known[plain]] / 1e9)
    if gigabytes == usual:
        return plain
    if gigabytes not in variants:
        sizes = ", ".join(f"{size} GB" for size in sorted({usual, *variants}))
        raise line.error(f"{known[plain]} must have one of these sizes of memory: {sizes}", f"{gigabytes} GB")
    return re.sub(r"[\s-]", "", variants[gigabytes]).upper()


def _network(rate: re.Match[str]) -> dict[str, Any]:
    """Return a network's bandwidth in Gbit/s and its kind, as settings; in the text, "B" means bytes and "b" bits."""
    unit = {"G": 1.0, "M": 1e-3, "T": 1e3}[rate["unit"].upper()]
    what = rate["what"] or ""
    bits = 8.0 if "B" in what.replace("bE", "") or "byte" in what.lower() else 1.0
    values: dict[str, Any] = {"gbits": _number(rate["rate"]) * unit * bits * int(rate["rails"] or 1)}
    if what.endswith("bE"):
        values["network"] = "Ethernet"
    if rate["scope"] and re.fullmatch(_DEVICE, rate["scope"], re.I):
        values["per_device"] = True
    return values


def _price(money: re.Match[str], per_host: int) -> dict[str, Any]:
    """Return the price of one device per hour and its currency, as settings."""
    price = _number(money["price"] or money["other"] or money["plain"])
    scope = money["of"] or money["each"] or ""
    if re.fullmatch(_HOST, scope, re.I):
        price /= per_host
    return {"price": price, "currency": _CURRENCIES[(money["before"] or money["after"] or "$").lower()]}
