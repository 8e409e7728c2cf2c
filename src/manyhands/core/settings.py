"""Options: dataclasses from which Python arguments, command line options and configuration files are derived.

The value of an option is that of the argument if given, else that of the configuration file, else that of the
environment variable, else the default.
"""

from __future__ import annotations

import dataclasses
import os
import tomllib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from .errors import FileError, SettingsError
from .files import read_file
from .task import convert

PREFIX = "MANYHANDS_"
"""Prefix of environment variables: MANYHANDS_EPOCHS sets `epochs`."""
MOST_BYTES = 1 << 20
"""Maximum bytes of a configuration file."""
ARGUMENT, DEFAULT = "argument", "default"

T = TypeVar("T")


def option(default: Any, help: str, *, metavar: str = "", secret: bool = False, in_files: bool = True) -> Any:
    """Return a field of an options class that the command line, configuration files and the environment can set.

    A field that is declared without `option` can be set in Python only.

    Args:
        default: The default value.
        help: The help of the command line; it says what the default is, or that there is none.
        metavar: The placeholder of the value in the help.
        secret: Whether the value must not appear in a command line, in `repr` or in logs.
        in_files: Whether configuration files and the environment can set the option too.

    >>> @dataclass(frozen=True, kw_only=True)
    ... class Batching:
    ...     max_rows: int = option(64, "Maximum rows of a batch; 64 by default.")
    >>> [field.name for field in options_of(Batching)]
    ['max_rows']
    """
    metadata = {"help": help, "metavar": metavar, "secret": secret, "in_files": in_files}
    return field(default=default, repr=not secret, metadata=metadata)


def options_of(kind: type) -> list[dataclasses.Field[Any]]:
    """Return the fields of an options class that were declared with `option`."""
    return [each for each in dataclasses.fields(kind) if "help" in each.metadata]


def from_flat(kinds: Sequence[type], values: Mapping[str, Any]) -> list[Any]:
    """Return an object of each options class, given values by field name; a name must belong to one class only."""
    names = {each.name: kind for kind in kinds for each in dataclasses.fields(kind)}
    unknown = sorted(set(values) - set(names))
    if unknown:
        raise SettingsError(f"options must be among {', '.join(names)}", got=unknown[0], remedy="correct the name")
    return [kind(**{name: value for name, value in values.items() if names[name] is kind}) for kind in kinds]


def require_positive(**values: int | None) -> None:
    """Raise SettingsError unless each value, passed by its name, is None or a whole number of at least 1."""
    for name, value in values.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise SettingsError(
                f"{name} must be a whole number of at least 1", got=repr(value), remedy=f"pass {name}=1 or more"
            )


@dataclass(frozen=True)
class Resolved(Generic[T]):
    """Settings, and for each of them the source of its value."""

    values: T
    sources: Mapping[str, str]
    """Source by setting: `argument`, the name of the file or of the environment variable, or `default`."""
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The tables of the configuration file, such as the task's parameters."""

    def chosen(self) -> dict[str, tuple[Any, str]]:
        """Return (value, source) of each setting that was not left at its default, by name."""
        return {
            name: (getattr(self.values, name), source) for name, source in self.sources.items() if source != DEFAULT
        }


def resolve_settings(
    kind: type[T],
    arguments: Mapping[str, Any],
    *,
    file: Path | None = None,
    tables: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Resolved[T]:
    """Create a dataclass of settings from arguments, a configuration file and environment variables.

    Args:
        kind: The dataclass.
        arguments: Values by field name; None counts as not given.
        file: A TOML file; None for none.
        tables: Names of tables that the file may contain in addition to settings.
        environ: The environment variables; by default those of this process.

    >>> @dataclass(frozen=True, kw_only=True)
    ... class Settings:
    ...     epochs: int = 1
    ...     on: str | None = None
    >>> resolve_settings(Settings, {"epochs": 3}, environ={"MANYHANDS_ON": "cpu*2"}).chosen()
    {'epochs': (3, 'argument'), 'on': ('cpu*2', 'MANYHANDS_ON')}
    """
    names = [f.name for f in dataclasses.fields(kind)]  # type: ignore[arg-type]
    values, sources, extra = _resolve([kind], names, arguments, file, tables, environ)
    return Resolved(kind(**values), sources, extra)


@dataclass(frozen=True)
class ResolvedOptions(Resolved[Mapping[type, Any]]):
    """Resolved settings of several options classes: one object for each class."""

    def of(self, kind: type[T]) -> T:
        """Return the object of an options class."""
        return cast(T, self.values[kind])

    @property
    def flat(self) -> dict[str, Any]:
        """The values of all options by name."""
        return {name: getattr(self.values[kind], name) for name, kind in _kinds(list(self.values)).items()}

    def chosen(self) -> dict[str, tuple[Any, str]]:
        """Return (value, source) of each option that was not left at its default, by name."""
        flat = self.flat
        return {name: (flat[name], source) for name, source in self.sources.items() if source != DEFAULT}


def resolve_options(
    kinds: Sequence[type],
    arguments: Mapping[str, Any],
    *,
    file: Path | None = None,
    tables: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> ResolvedOptions:
    """Create objects of several options classes as `resolve_settings` does; arguments are given by option name."""
    in_files = [each.name for kind in kinds for each in options_of(kind) if each.metadata["in_files"]]
    values, sources, extra = _resolve(kinds, in_files, arguments, file, tables, environ)
    only_given = {name: value for name, value in arguments.items() if name not in in_files and value is not None}
    objects = dict(zip(kinds, from_flat(kinds, {**values, **only_given}), strict=True))
    return ResolvedOptions(objects, {**sources, **dict.fromkeys(only_given, ARGUMENT)}, extra)


def _kinds(kinds: Sequence[type]) -> dict[str, type]:
    """Return the class of every option, by name."""
    return {each.name: kind for kind in kinds for each in options_of(kind)}


def _resolve(
    kinds: Sequence[type],
    names: Sequence[str],
    arguments: Mapping[str, Any],
    file: Path | None,
    tables: Sequence[str],
    environ: Mapping[str, str] | None,
) -> tuple[dict[str, Any], dict[str, str], dict[str, dict[str, Any]]]:
    """Return the values that were given and the sources of all settings, by name, and the tables of the file."""
    hints = {name: hint for kind in kinds for name, hint in typing.get_type_hints(kind, localns={"Any": Any}).items()}
    written, extra = _read(file, {name: hints[name] for name in names}, tables)
    found = _from_environment(environ if environ is not None else os.environ, hints, names)
    values: dict[str, Any] = {}
    sources = dict.fromkeys(names, DEFAULT)
    for name in names:
        if arguments.get(name) is not None:
            values[name], sources[name] = arguments[name], ARGUMENT
        elif name in written:
            values[name], sources[name] = written[name], file.name if file is not None else ""
        elif name in found:
            values[name], sources[name] = found[name], variable(name)
    return values, sources, extra


def variable(name: str) -> str:
    """Return the name of the environment variable of a setting.

    >>> variable("save_every")
    'MANYHANDS_SAVE_EVERY'
    """
    return PREFIX + name.upper()


def _from_environment(environ: Mapping[str, str], hints: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {
        name: convert(variable(name), environ[variable(name)], hints[name])
        for name in names
        if environ.get(variable(name))
    }


def _read(
    file: Path | None, hints: Mapping[str, Any], tables: Sequence[str]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the settings and the tables of a file; raise SettingsError for unknown names and wrong types."""
    if file is None:
        return {}, {}
    values: dict[str, Any] = {}
    extra: dict[str, dict[str, Any]] = {}
    for key, value in _parse(file).items():
        name = key.replace("-", "_")
        if name in tables and isinstance(value, dict):
            extra[name] = value
        elif name in hints:
            values[name] = _checked(f"{name} in {file}", value, hints[name])
        else:
            known = ", ".join([*hints, *(f"[{table}]" for table in tables)])
            raise SettingsError(f"{file} may only set {known}", got=repr(key), remedy="correct the name")
    return values, extra


def _parse(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_file(file, MOST_BYTES, follow_links=True).decode())
    except (OSError, FileError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SettingsError(
            "the configuration file must be readable", got=f"{file} ({reason})", remedy="correct its path"
        ) from None
    except (ValueError, RecursionError) as error:
        raise SettingsError(
            f"{file} must be valid TOML", got=str(error), remedy='write lines such as epochs = 3 or on = "cpu*2"'
        ) from None


def _checked(what: str, value: Any, hint: Any) -> Any:
    if typing.get_origin(hint) is tuple:
        return convert(what, value if isinstance(value, str) else ",".join(map(str, value)), hint)
    if Path in typing.get_args(hint) and isinstance(value, str):
        return Path(value)
    kinds = typing.get_args(hint) or (hint,)
    if type(value) is int and float in kinds and int not in kinds:
        return float(value)
    if type(value) in kinds:
        return value
    shown = " or ".join(kind.__name__ for kind in kinds if kind is not type(None))
    raise SettingsError(
        f"{what} must be of type {shown}", got=f"{value!r} ({type(value).__name__})", remedy="correct the value"
    )
