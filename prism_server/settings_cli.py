"""A process's settings (`ServerSettings` for the server) from the command line, the environment and a file.

Strongest first: `--kv.dtype bf16`, then `PRISM_KV__DTYPE=bf16`, then `--config FILE` with `{"kv": {"dtype": "bf16"}}`,
then the defaults. Whatever names no option or is no value of it is an error, told with the place it came from; several
are joined by `; `.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from prism_server import __version__
from prism_server.cli_support import ArgumentParser, nearest
from prism_server.errors import StartupError
from prism_server.settings import Group, ServerSettings

ENV_PREFIX = "PRISM_"
NESTING = "__"

SERVICE_LINK = re.compile(r"PRISM_(?:(?!__)\w)*?(SERVICE_HOST|SERVICE_PORT\w*|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")
"""Kubernetes puts `<SERVICE>_SERVICE_HOST`, `<SERVICE>_PORT=tcp://...` and their like into every container of a
namespace; a Service named `prism-...` must not stop a server from starting."""


@dataclass(frozen=True, slots=True)
class Option:
    """One leaf of the settings: `group.name`."""

    group: str
    name: str
    field: FieldInfo

    @property
    def path(self) -> str:
        return f"{self.group}.{self.name}"

    @property
    def flag(self) -> str:
        return f"--{self.path}"

    @property
    def env_name(self) -> str:
        return f"{ENV_PREFIX}{self.group}{NESTING}{self.name}".upper()

    @property
    def metavar(self) -> str:
        """What kind of value is expected, as `--help` shows it."""
        return _metavar(self.field.annotation)

    @property
    def help(self) -> str:
        default = self.field.get_default()
        shown = "none" if default in (None, ()) else json.dumps(default) if default == "" else _spelled(default)
        text = f"{self.field.description} " if self.field.description else ""
        return f"{text}[default: {shown}; env: {self.env_name}]".replace("%", "%%")


@dataclass(frozen=True, slots=True)
class Given:
    """A value from one of the sources and where it came from, for error messages."""

    value: Any
    source: str


Settings = TypeVar("Settings", bound=Group)


@dataclass(frozen=True, slots=True)
class SettingsSource(Generic[Settings]):
    """Where the settings of one kind of process come from. `shortcuts`: further flags, by the option they stand for."""

    kind: type[Settings]
    shortcuts: Mapping[str, str]

    def options(self) -> Iterator[Option]:
        """Every option, in the order of the settings' declaration."""
        for group, field in self.kind.model_fields.items():
            assert isinstance(field.annotation, type)
            assert issubclass(field.annotation, Group)
            for name, leaf in field.annotation.model_fields.items():
                yield Option(group, name, leaf)

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Adds `--config`, `--version`, the shortcuts and one `--group.name` for every option."""
        parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
        parser.add_argument(
            "--config", metavar="FILE", type=Path, help="JSON file with options, weakest of the sources"
        )
        known = {option.path: option for option in self.options()}
        for flag, path in self.shortcuts.items():
            parser.add_argument(flag, metavar=known[path].metavar, dest=path, help=f"short for --{path}")
        sections: dict[str, argparse._ArgumentGroup] = {}
        for option in known.values():
            if option.group not in sections:
                about = self.kind.model_fields[option.group].annotation.__doc__
                sections[option.group] = parser.add_argument_group(option.group, about)
            sections[option.group].add_argument(option.flag, dest=option.path, metavar=option.metavar, help=option.help)

    def settings_from(self, arguments: argparse.Namespace, environ: Mapping[str, str] | None = None) -> Settings:
        """What parsed arguments, the environment (by default the process's own) and `--config` say together."""
        given = self._from_file(arguments.config) if arguments.config else {}
        given |= self._from_environment(os.environ if environ is None else environ)
        for option in self.options():
            value = getattr(arguments, option.path)
            if value is not None:
                given[option.path] = Given(value, option.flag)
        nested: dict[str, dict[str, Any]] = {}
        for path, entry in given.items():
            group, name = path.split(".", 1)
            nested.setdefault(group, {})[name] = entry.value
        try:
            return self.kind.model_validate(nested)
        except ValidationError as invalid:
            raise StartupError("; ".join(_problem(error, given) for error in invalid.errors())) from None

    def _from_file(self, path: Path) -> dict[str, Given]:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as missing:
            raise StartupError(f"--config {path}: cannot be read: {missing.strerror}") from None
        except ValueError as broken:
            raise StartupError(f"--config {path}: not valid JSON: {broken}") from None
        if not isinstance(content, dict):
            raise StartupError(f"--config {path}: must hold a JSON object of groups")
        known = {option.path for option in self.options()}
        found, problems = dict[str, Given](), list[str]()
        for group, values in content.items():
            if group not in self.kind.model_fields:
                problems.append(f"{path}: unknown group {group!r}; the groups are {', '.join(self.kind.model_fields)}")
            elif not isinstance(values, dict):
                problems.append(f"{path}: {group} is {json.dumps(values)}, but must be an object of options")
            else:
                for name, value in values.items():
                    key = f"{group}.{name}"
                    if key not in known:
                        problems.append(f"{path}: unknown option {key}{nearest(key, known)}")
                    found[key] = Given(value, f"{path}: {key}")
        if problems:
            raise StartupError("; ".join(problems))
        return found

    def _from_environment(self, environ: Mapping[str, str]) -> dict[str, Given]:
        known = {option.env_name: option for option in self.options()}
        found, problems = dict[str, Given](), list[str]()
        for name, value in environ.items():
            option = known.get(name.upper())
            if option is not None:
                found[option.path] = Given(value, name)
            elif name.upper().startswith(ENV_PREFIX) and not _is_service_link(name, value):
                problems.append(f"environment variable {name} names no option{nearest(name.upper(), known)}")
        if problems:
            raise StartupError("; ".join(problems))
        return found


SERVER = SettingsSource(ServerSettings, {"--model": "model.path", "--load-format": "model.load_format"})


def options() -> Iterator[Option]:
    """Every option of the server, in the order of settings.py."""
    return SERVER.options()


def load_settings(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> ServerSettings:
    """The settings of `prism-serve argv`. StartupError with one line if anything is wrong; `--help` exits."""
    parser = ArgumentParser("prism-serve", "Serve a Qwen3-VL model over HTTP.")
    parser.usage = "%(prog)s [--model PATH] [--config FILE] [--group.option VALUE ...]"
    SERVER.add_arguments(parser)
    return SERVER.settings_from(parser.parse_strictly(argv), environ)


def add_setting_arguments(parser: argparse.ArgumentParser) -> None:
    """The server's options, for another command of which they are a part."""
    SERVER.add_arguments(parser)


def settings_from(arguments: argparse.Namespace, environ: Mapping[str, str] | None = None) -> ServerSettings:
    """The server's settings from arguments that `add_setting_arguments` has added."""
    return SERVER.settings_from(arguments, environ)


def _is_service_link(name: str, value: str) -> bool:
    if SERVICE_LINK.fullmatch(name):
        return True
    return name.endswith("_PORT") and value.startswith(("tcp://", "udp://", "sctp://"))


def _problem(error: ErrorDetails, given: Mapping[str, Given]) -> str:
    """One validation error as `where 'value': what is allowed`."""
    reason = error["msg"].removeprefix("Value error, ").replace("Input should be", "must be").split(", unable to")[0]
    entry = given.get(".".join(str(step) for step in error["loc"][:2]))  # of a list, not of its item
    return f"{entry.source} {_spelled(entry.value)!r}: {reason}" if entry else reason


def _metavar(annotation: Any) -> str:
    """`N`, `X`, `true|false`, `FILE`, `TEXT`, `A,B` for a list, or the choices of a Literal."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _metavar(get_args(annotation)[0])
    if origin is tuple:
        return "A,B"
    if origin is Literal:
        return "{" + ",".join(get_args(annotation)) + "}"
    if origin in (Union, types.UnionType):
        return _metavar(next(member for member in get_args(annotation) if member is not type(None)))
    return {bool: "true|false", int: "N", float: "X", str: "TEXT"}.get(annotation, "FILE")


def _spelled(value: Any) -> str:
    """A value as it is written on the command line or in JSON."""
    return value if isinstance(value, str) else json.dumps(value, default=str)
