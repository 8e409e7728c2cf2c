"""Checks of installed software: supported versions of Python and torch, a compiler, and optional packages."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
import sysconfig
from pathlib import Path

from .finding import Finding, broken, slow

_EXTRAS = {
    "optuna": "tune",
    "uvloop": "serve",
    "zmq": "parameter-server",
    "keras": "keras",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "pynvml": "gpu",
    "pyarrow": "files",
    "ray": "ray",
    "opentelemetry": "traces",
}
"""Optional packages, and the extra of manyhands that installs each of them."""


def system(platform: str = sys.platform) -> Finding:
    """Check that the operating system is Linux, which runs with several processes need."""
    if platform == "linux":
        return Finding("system", "Linux")
    return slow("system", platform, "several processes (and devices) need Linux", "use Linux, or WSL on Windows")


def python(version: tuple[int, ...] | None = None, wanted: str | None = None) -> Finding:
    """Check that the version of Python is in the supported range."""
    text = ".".join(map(str, (version or sys.version_info)[:3]))
    wanted = wanted or importlib.metadata.metadata("manyhands")["Requires-Python"]
    return _version("Python", text, wanted, f"install Python {wanted} and create a new environment with it")


def torch_version(version: str | None = None, wanted: str | None = None) -> Finding:
    """Check that the installed version of torch is in the supported range."""
    version = version or importlib.metadata.version("torch")
    needs = (need for need in importlib.metadata.requires("manyhands") or () if need.startswith("torch"))
    wanted = wanted or next(needs, "torch").removeprefix("torch")
    return _version("torch", version, wanted, f"pip install 'torch{wanted}'")


def compiler(found: str | None = None, has_headers: bool | None = None) -> Finding:
    """Check that a C++ compiler and Python's headers are installed, which torch.compile needs."""
    if found is None:
        names = (os.environ.get("CXX", ""), "g++", "clang++", "c++")
        found = next((path for name in names if name and (path := shutil.which(name))), "")
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    has_headers = headers.exists() if has_headers is None else has_headers
    why = "torch.compile cannot compile networks, so steps run operation by operation"
    if not found:
        return slow("compiler", "no C++ compiler", why, "apt install g++, or set CXX")
    if not has_headers:
        return slow("compiler", f"{found}, but no {headers}", why, "apt install python3-dev")
    return Finding("compiler", found)


def extras(installed: frozenset[str] | None = None) -> Finding:
    """Report which optional packages are installed; none of them is required."""
    if installed is None:
        installed = frozenset(name for name in _EXTRAS if importlib.util.find_spec(name) is not None)
    have = ", ".join(name for name in _EXTRAS if name in installed) or "none"
    missing = [extra for name, extra in _EXTRAS.items() if name not in installed]
    more = f"; pip install 'manyhands[{','.join(missing)}]' adds the others" if missing else ""
    return Finding("extras", f"{have}{more}")


def inside(version: str, wanted: str) -> bool:
    """Return whether a version satisfies a specifier such as ">=2.11,<2.16", of `>=`, `>`, `<=` and `<`.

    >>> inside("2.13.0+cpu", ">=2.11,<2.16"), inside("2.16.0", ">=2.11,<2.16")
    (True, False)
    """
    compare = {">=": tuple.__ge__, ">": tuple.__gt__, "<=": tuple.__le__, "<": tuple.__lt__}
    here = _numbers(version)
    return all(compare[sign](here, _numbers(bound)) for sign, bound in re.findall(r"(>=|<=|>|<)\s*([\d.]+)", wanted))


def _version(name: str, version: str, wanted: str, remedy: str) -> Finding:
    if inside(version, wanted):
        return Finding(name, version)
    return broken(name, f"{version}, but only {wanted} is supported", "manyhands is not tested with it", remedy)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text.split("+")[0])[:3])
