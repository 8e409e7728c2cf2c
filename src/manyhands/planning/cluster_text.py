"""Parser for descriptions of a cluster in a line of text, such as "8 hosts x 8 H100, 400Gb/s InfiniBand, $2/h".

Each feature (price, network, devices, hosts) is found anywhere in the line and removed from it. A word that is left
over is an error, so that nothing that the user wrote is ignored.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from ..core import SettingsError
from ..costs import chip, device_names

REMEDY = 'write for example "8 hosts x 8 H100, 400Gb/s InfiniBand, $2/h", or pass a TOML file'
USUAL_PER_HOST = 8
"""Assumed number of devices per host if a line gives a larger number of devices, and no number of hosts."""
MOST_DEVICES = 10**6
_NUMBER = r"\d+(?:[.,]\d+)?"
_HOST = r"(?:hosts?|nodes?|servers?|machines?|instances?|boxe?s?)\b"
_DEVICE = r"(?:devices?|gpus?|cards?|accelerators?)\b"
_WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
_CURRENCIES = {
    "$": "$", "usd": "$", "us$": "$", "dollar": "$", "dollars": "$", "€": "€", "eur": "€", "euro": "€", "euros": "€",
    "£": "£", "gbp": "£", "¥": "¥", "jpy": "¥", "yen": "¥", "₹": "₹", "inr": "₹",
    "chf": "CHF", "cny": "CNY", "rmb": "CNY", "cad": "CAD", "aud": "AUD", "sek": "SEK", "krw": "KRW",
}  # fmt: skip
_MONEY = "(?:{})".format("|".join(re.escape(sign) for sign in sorted(_CURRENCIES, key=len, reverse=True)))
_PRICE = re.compile(
    rf"(?:(?<![a-z])(?P<before>{_MONEY})\s*(?P<price>{_NUMBER})|(?P<other>{_NUMBER})\s*(?P<after>{_MONEY})(?![a-z])"
    rf"|(?<![^\s,])(?P<plain>{_NUMBER})(?=\s*/\s*h))"
    rf"(?P<per>(?:[\s/-]*\b(?:per|an?|each|every|for|the|whole|entire|in|h|hrs?|hours?|hourly|gpuh|all|total|cluster"
    rf"|{_DEVICE}|{_HOST})\b)*)",
    re.IGNORECASE,
)
_HOURLY = re.compile(r"\b(?:gpu)?(?:h|hrs?|hours?|hourly)\b", re.IGNORECASE)
_GENERATIONS = {"fdr": 56.0, "edr": 100.0, "hdr": 200.0, "ndr": 400.0, "xdr": 800.0}
"""Gbit/s of a port of InfiniBand by its generation."""
_GENERATION = "(?:FDR|EDR|HDR|NDR|XDR)"
_RATE = re.compile(
    rf"(?<![\w.])(?:(?P<rails>\d+)\s*(?i:x|(?:nics?|ports?|rails?|links?|hcas?)\s*(?:x|of|at|with|,)?)\s*"
    rf"(?i:{_GENERATION}\s*)?)?"
    rf"(?P<rate>{_NUMBER})[-\s]*(?P<unit>[GgMmTt])"
    r"(?P<what>i?[bB](?:its?|ytes?)?\s*(?:/\s*s(?:ec(?:ond)?)?|ps|per\s+sec(?:ond)?)"
    r"|igab(?:it|yte)s?(?:\s*/\s*s(?:ec(?:ond)?)?|ps|\s*per\s+sec(?:ond)?)?|b(?:it)?|bE|ig(?:E|abitE)?|ps)?(?!\w)"
    rf"(?i:\s*(?:/|per|a|for each|each)\s*(?P<scope>{_DEVICE}|{_HOST}|nics?\b|ports?\b))?",
)
"""Bandwidth of a network. Bytes need "per second", because "80GB" alone is the memory of a device."""
_PORT = re.compile(rf"(?:(?<![\w.])(?P<rails>\d+)\s*x\s*)?\b(?P<kind>{_GENERATION})[-\s]?(?P<rate>\d{{2,3}})?\b", re.I)
_PER_DEVICE = re.compile(rf"\b(?:per|each|a)\s+{_DEVICE}", re.IGNORECASE)
_NETWORKS = {
    "ib": "InfiniBand", "infiniband": "InfiniBand", "ndr": "InfiniBand", "hdr": "InfiniBand", "edr": "InfiniBand",
    "fdr": "InfiniBand", "xdr": "InfiniBand", "quantum": "InfiniBand",
    "roce": "RoCE", "rocev2": "RoCE", "efa": "RoCE", "rdma": "RoCE", "slingshot": "RoCE", "spectrum": "RoCE",
    "ethernet": "Ethernet", "eth": "Ethernet", "tcp": "Ethernet", "gbe": "Ethernet",
}  # fmt: skip
_PRODUCT = re.compile(r"\b(Quantum|Slingshot|Spectrum|ConnectX|BlueField)[\s-]?(?:\d+|X)\b", re.I)
_INSIDE = re.compile(
    r"\b(?P<kind>NVLink|NVSwitch|PCI[\s-]?e(?:xpress)?)[\s-]*(?:gen\s*)?(?P<version>[1-6])?(?:\.0)?\b"
    r"(?:\s*x\s*(?P<lanes>\d+)\b(?!\s*(?:x|GPU|[A-Z]+\d)))?",
    re.I,
)
_FORM = re.compile(r"\bSXM\s*-?\s*[2-6]?\b", re.I)
_NVL = re.compile(r"[\s-]+NVL\b", re.I)
_MEMORY = re.compile(r"[-(\s]*(?P<gigabytes>\d+)\s*G(?:i?B)?\b(?!\s*(?:/|p|it))\)?", re.I)
_INSTANCE = re.compile(r"\b(?:\w+\.\s*(?:\d+\s*x\s*large|metal)|[a-z]\d-\w+gpu-\d+g|Standard_N\w+)\b", re.I)
_FILLERS = {
    "per", "each", "every", "a", "an", "over", "network", "networking", "between", "and", "with", "of", "on", "in",
    "the", "for", "at", "x", "by", "via", "using", "through", "interconnect", "connected", "fabric", "them", "way",
    "gpu", "gpus", "device", "devices", "card", "cards", "nic", "nics", "hosts", "host", "nodes", "node", "cluster",
    "nvidia", "amd", "tesla", "geforce", "instinct", "intel", "hgx", "sxm", "oam", "v2", "price", "cost", "memory",
    "hbm2", "hbm2e", "hbm3", "hbm3e", "gddr5", "gddr6", "gddr6x", "gddr7", "connectx", "bluefield", "single",
}  # fmt: skip


@dataclass
class _ClusterLine:
    """A line of text from which the parser removes one feature (devices, price, network, hosts) after the other."""

    text: str
    whole: str = field(init=False)

    def __post_init__(self) -> None:
        self.whole = self.text
        self.text = _normal(self.text)

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
    line = _ClusterLine(text)
    _require_usual(line)
    money, rate = line.take(_PRICE), line.take(_RATE)
    found = next((match for pattern in _SHAPES if (match := line.take(pattern)) is not None), None)
    if found is None:
        raise line.error("a cluster must be written as hosts times devices", text)
    parts = found.groupdict()
    device = _device(line, parts["name"], parts["memory"])
    values: dict[str, Any] = {**device, **_shape(line, parts)}
    hosts, per_host = values["hosts"], values["per_host"]
    if hosts * per_host < 1:
        raise line.error("hosts and devices must be at least 1", text)
    if hosts * per_host > MOST_DEVICES:
        raise line.error(f"a cluster must have at most {MOST_DEVICES:,} devices", f"{hosts * per_host:,} devices")
    port = line.take(_PORT)
    if rate is not None:
        values |= {"network": "InfiniBand"} if port is not None else {}
        values |= _network(line, rate)
    elif port is not None:
        values |= _port(port)
        if port["rate"] is None:
            values["assumed"] = (*values.get("assumed", ()), f"{values['gbits']:g} Gb/s, from {port[0].strip()!r}")
    if "gbits" in values and line.take(_PER_DEVICE) is not None:
        values["per_device"] = True
    if money is not None:
        values |= _price(line, money, hosts, per_host)
    for word in re.findall(r"[^\W_]+", line.text):
        if word.lower() in _NETWORKS:
            values["network"] = _NETWORKS[word.lower()]
        elif word.lower() not in _FILLERS:
            raise _unknown(line, word)
    return values


def has_devices(text: str) -> bool:
    """Return whether a text has a number of devices of a kind, such as "8 A100"; "400Gb/s" has none."""
    rest = _normal(text)
    return any(
        _key(found["name"], known) in known
        for known in [_known()]
        for pattern in _SHAPES
        for found in pattern.finditer(rest)
    )


def _normal(text: str) -> str:
    """Return a line with digits for words, "x" for signs of multiplication, and commas in place of brackets."""
    text = re.sub("[\u2010-\u2015\u2212]", "-", text)  # hyphens, dashes and the sign of subtraction
    text = re.sub("[\u00d7\u2715\u2716\u2217*]", "x", text)  # signs of multiplication
    text = re.sub(r"(?<![\w.,])\d{1,3}(?:,\d{3})+(?![\d.])", lambda found: found[0].replace(",", ""), text)
    text = re.sub(r"[()\[\];:@|]", " , ", text)
    text = re.sub(
        rf"\b({'|'.join(_WORDS)})\b(?=[\s-])", lambda w: str(_WORDS.index(w[0].lower()) + 1), text, flags=re.I
    )
    text = re.sub(r"^\s*(?:an?\s+)?single\s+(?=[A-Za-z])", "1 ", text, flags=re.I)
    text = re.sub(r"\b(?:without|no)\s+NVLink\b", "PCIe", text, flags=re.I)
    text = re.sub(r"(\d)[\s-]+cores?\s+CPUs?\b", r"\1 cores", text, flags=re.I)
    text = re.sub(r"(?<=\s)à(?=\s)", "of", text)
    text = re.sub("(?<=\\w)['\u2019]s\\b", "s", text)
    text = _PRODUCT.sub(r"\1", text)
    return re.sub(r"(?<=\d)\s*[xX]\s*(?=\D)", " x ", re.sub(r"\s+", " ", text)).strip()


def _require_usual(line: _ClusterLine) -> None:
    """Raise SettingsError if a line has negative or fractional counts, or names a type of cloud instance."""
    instance = _INSTANCE.search(line.whole)
    if instance is not None:
        raise line.error(
            "types of cloud instances are not known",
            repr(instance[0]),
            'write what it consists of, for example "2 hosts x 8 A100-40GB, 400Gb/s RoCE, $32/h per host"',
        )
    if re.search(r"(?<![\w.])-\s*\d", line.text):
        raise line.error("the numbers of a cluster must be above 0", line.whole)
    text = _INSIDE.sub("", line.text)
    part = re.search(rf"(?<![\w.])\d*\.\d+\s*(?:x\s*)?(?=(?:{_CHIP_NAME})|{_HOST}|{_DEVICE})", text, re.I)
    if part is not None:
        raise line.error("hosts and devices must be whole numbers", repr(part[0].strip()))


def _unknown(line: _ClusterLine, word: str) -> SettingsError:
    """Return an error about a word that the parser does not understand."""
    if has_devices(line.text):
        remedy = 'write "+" between kinds of hosts, for example "2 hosts x 8 H100 + 4 hosts x 8 A100, 400Gb/s"'
        return line.error("a line must describe one kind of hosts", repr(word), remedy)
    if _RATE.search(line.text) or _PRICE.search(line.text):
        return line.error("a cluster must have one network and one price", repr(word))
    return line.error("a cluster must be written as hosts, devices, a network and a price", repr(word))


def _number(text: str) -> float:
    return float(text.replace(",", "."))


_CHIP_NAME = (
    r"(?:RTX|GTX|MI|Radeon)[\s-]*A?\d+(?:[\s-]*(?:Ti|Super|Ada|XTX?|X))?s?\b|[A-Za-z]{1,3}\d+[A-Za-z]*(?![A-Za-z0-9])"
    r"|CPUs?\b|cores?\b"
)
_CHIP = (
    rf"(?:(?:NVIDIA|AMD|Tesla|GeForce|Instinct|Intel)[\s-]+)*(?P<name>{_CHIP_NAME})"
    r"(?:(?:[\s,-]*SXM\s*-?[2-6]?)?[\s,-]*(?P<memory>\d+)\s*GB\b(?!\s*(?:/|p)))?"
)
_OF_KIND = rf"(?:x\s*|of\s+)?(?:{_DEVICE}[\s,]*(?:of\s+|type\s+)*)?"
_SHAPES = tuple(
    re.compile(pattern, re.I)
    for pattern in (
        # 4 DGX H100, 4 nodes of DGX H100, DGX H100
        rf"\b(?:(?P<hosts>\d+)\s*(?:x\s*|{_HOST}\s*(?:of|x|,)?\s*)?)?(?:DGX|HGX)[\s-]*{_CHIP}",
        # 8 hosts x 8 H100, 8 nodes with 8 A100 each, 8 x 8 x H100, 8 nodes, each with 8 H100, 8 hosts x 8 GPUs (H100)
        rf"\b(?P<hosts>\d+)\s*(?:{_HOST}[\s,]*(?:(?:each|every|x|of|with|have|having|has|containing)\s*)*|x|of)\s*"
        rf"(?P<count>\d+)\s*{_OF_KIND}{_CHIP}",
        # 8 8-GPU H100 nodes, 4 8xH100 nodes
        rf"\b(?P<hosts>\d+)\s*(?:x\s*)?(?P<count>\d+)[\s-]*(?:x|{_DEVICE})?[\s-]*{_CHIP}\s*{_HOST}",
        # 8 H100 nodes
        rf"\b(?P<hosts>\d+)\s*(?:x\s*)?{_CHIP}\s*{_HOST}",
        # 64 H100, 64 GPUs (H100)
        rf"\b(?P<devices>\d+)\s*{_OF_KIND}{_CHIP}",
        # H100 x 64
        rf"\b{_CHIP}\s*x\s*(?P<devices>\d+)\b(?!\s*{_HOST})",
    )
)
_PER_HOST = re.compile(
    rf"\b(?P<per>\d+)\s*(?:x\s*)?(?:{_DEVICE}\s*)?(?:per|an?|/|on each|in each|each)\s*{_HOST}"
    rf"|\bin groups of (?P<group>\d+)|\b(?:per|each)\s+{_HOST}",
    re.I,
)
_ON_HOSTS = re.compile(rf"\b(?:on|in|over|across)\s*(?P<hosts>\d+)\s*{_HOST}|\b(?P<listed>\d+)\s*{_HOST}", re.I)


def _shape(line: _ClusterLine, parts: dict[str, str | None]) -> dict[str, Any]:
    """Return the numbers of hosts and of devices per host, as settings.

    `parts` has the numbers that were matched together with the devices; others are removed from the line.
    """
    per, on = line.take(_PER_HOST), line.take(_ON_HOSTS)
    number = (per["per"] or per["group"]) if per is not None else None
    per_host = int(number) if number else None
    hosts = int(on["hosts"] or on["listed"]) if on is not None else None
    values: dict[str, Any] = {}
    if not parts.get("devices"):
        named = int(parts.get("hosts") or 1)
        count = int(parts.get("count") or per_host or USUAL_PER_HOST)
        if (on is not None and on["listed"]) or hosts not in (None, named) or per_host not in (None, count):
            given = f"{named} hosts x {count} and {hosts or named} hosts x {per_host or count}"
            raise line.error("a line must describe one number of hosts and of devices per host", given)
        if not (parts.get("count") or number or re.search(r"\b[DH]GX\b", line.whole, re.I)):
            values["assumed"] = (_assumed(count),)
        return {**values, "hosts": named, "per_host": count}
    devices = int(str(parts["devices"]))
    if per_host is None and hosts is None and devices > USUAL_PER_HOST and _is_gpu(str(parts["name"])):
        per_host = USUAL_PER_HOST
        values["assumed"] = (_assumed(per_host),)
    elif per_host is None:
        per_host = devices // hosts if hosts else devices
    if not per_host or devices % per_host or (hosts is not None and hosts * per_host != devices):
        given = f"{devices} devices, {f'{hosts} hosts, ' if hosts else ''}{per_host} per host"
        raise line.error(
            "the number of devices must be hosts times devices per host", given, 'write for example "2 hosts x 6 H100"'
        )
    return {**values, "hosts": devices // per_host, "per_host": per_host}


def _assumed(per_host: int) -> str:
    return f"{per_host} devices in a host (write for example '16 per host')"


def _is_gpu(name: str) -> bool:
    return not name.lower().startswith(("cpu", "core"))


def _known() -> dict[str, str]:
    """Return the names of devices in the catalogue, by their names in capital letters without spaces and hyphens."""
    return {re.sub(r"[\s-]", "", one).upper(): one for one in device_names()}


def _key(name: str, known: dict[str, str]) -> str:
    """Return the key in `known` of a device's name as it is written, which may be plural; other names are returned."""
    plain = "CPU" if not _is_gpu(name) else re.sub(r"[\s-]", "", name).upper()
    ways = (plain, plain.removesuffix("S"), f"RTX{plain}", f"RTX{plain.removesuffix('S')}")
    return next((way for way in ways if way in known), plain)


def _device(line: _ClusterLine, name: str, gigabytes: str | None) -> dict[str, Any]:
    """Return the settings of a device: its name in the catalogue, and the link between devices of a host if given.

    Its form factor, memory and link are removed from the line.
    """
    values: dict[str, Any] = {}
    known = _known()
    plain = _key(name, known)
    form, inside, bridged, memory = line.take(_FORM), line.take(_INSIDE), line.take(_NVL), line.take(_MEMORY)
    size = gigabytes or (memory and memory["gigabytes"])
    if plain not in known:
        remedy = "choose one of them, or describe the device under [chip] in a TOML file"
        raise line.error(f"a device must be one of the catalogue ({', '.join(known.values())})", repr(name), remedy)
    if bridged is not None:
        if f"{plain}NVL" not in known:
            raise line.error("this device has no variant NVL in the catalogue", repr(f"{name} NVL"), f"write {name}")
        plain = f"{plain}NVL"
    kind = (inside["kind"] if inside is not None else "").lower()
    usual = chip(known[plain]).inside
    if inside is not None and inside["lanes"] not in (None, "16"):
        remedy = "describe the device's link under [chip] in a TOML file"
        raise line.error("PCIe must have 16 lanes", f"{inside['lanes']} lanes", remedy)
    if kind.startswith("pci"):
        if form is None and f"{plain}PCIE" in known:
            plain = f"{plain}PCIE"
        elif inside is not None and (inside["version"] or not usual.startswith("PCIe")):
            values["inside"] = f"PCIe {inside['version'] or 4}"
    elif kind and not usual.startswith("NVLink"):
        raise line.error(
            f"{known[plain]} is linked by {usual}", repr(kind), "omit it, or write the link in a TOML file"
        )
    elif inside is not None and inside["version"]:
        values["inside"] = f"NVLink {inside['version']}"
    if size:
        plain = _with_memory(line, plain, int(size), known)
    return {"device": known[plain], **values}


def _with_memory(line: _ClusterLine, plain: str, gigabytes: int, known: dict[str, str]) -> str:
    """Return the key in `known` of a device's variant with so much memory; raise SettingsError if there is none."""
    named, base = device_names(), known[plain]
    variants = {
        round(size / 1e9): one for one, size in named.items() if one == base or re.fullmatch(rf"{base}-\d+GB", one)
    }
    if gigabytes not in variants:
        sizes = ", ".join(f"{size} GB" for size in sorted(variants))
        raise line.error(f"{base} must have one of these sizes of memory: {sizes}", f"{gigabytes} GB")
    return re.sub(r"[\s-]", "", variants[gigabytes]).upper()


def _network(line: _ClusterLine, rate: re.Match[str]) -> dict[str, Any]:
    """Return a network's bandwidth in Gbit/s and its kind, as settings; in the text, "B" means bytes and "b" bits."""
    unit = {"G": 1.0, "M": 1e-3, "T": 1e3}[rate["unit"].upper()]
    what, scope = rate["what"] or "", (rate["scope"] or "").lower()
    bits = 8.0 if "B" in what.replace("bE", "") or "byte" in what.lower() else 1.0
    if scope.startswith(("nic", "port")) and rate["rails"] is None:
        remedy = 'write their number, for example "8x400Gb/s", or "400Gb/s per device"'
        raise line.error("the number of network cards of a host must be known", repr(rate[0].strip()), remedy)
    values: dict[str, Any] = {"gbits": _number(rate["rate"]) * unit * bits * int(rate["rails"] or 1)}
    if what.endswith("E") or what == "ig":
        values["network"] = "Ethernet"
    if re.fullmatch(_DEVICE, scope):
        values["per_device"] = True
    return values


def _port(port: re.Match[str]) -> dict[str, Any]:
    """Return the bandwidth of InfiniBand ports that a line only names, such as "8x NDR", as settings."""
    each = float(port["rate"] or _GENERATIONS[port["kind"].lower()])
    return {"gbits": each * int(port["rails"] or 1), "network": "InfiniBand"}


def _price(line: _ClusterLine, money: re.Match[str], hosts: int, per_host: int) -> dict[str, Any]:
    """Return the price of one device per hour and its currency, as settings."""
    price, per = _number(money["price"] or money["other"] or money["plain"]), money["per"] or ""
    if not _HOURLY.search(per):
        raise line.error("a price must be per hour", repr(money[0].strip()), 'write for example "$2/h per device"')
    if re.search(r"\b(?:cluster|total|all|whole|entire)\b", per, re.I):
        price /= hosts * per_host
    elif re.search(_HOST, per, re.I):
        price /= per_host
    return {"price": price, "currency": _CURRENCIES[(money["before"] or money["after"] or "$").lower()]}
