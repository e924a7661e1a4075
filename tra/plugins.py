"""Users' own mechanisms, tasks and recipes: modules outside this package whose names behave like built-in ones.

A plug-in is a module that defines any of `MECHANISMS`, `TASKS` and `RECIPES`, dicts like those of `tra.attention`,
`tra.tasks` and `tra.recipes`. It is found through an entry point in the group `tra.plugins`, or loaded by name::

    tra train my-recipe --plugin my_module
    tra.plugins.load("my_module")

Nothing that lies in a file causes an import: a stored run names the plug-in it needs, and an error names a missing one.
"""

import importlib
import importlib.util
import sys
import traceback
import warnings
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from tra.errors import RunError
from tra.lookup import lookup

GROUP = "tra.plugins"
KINDS = {"MECHANISMS": "tra.attention", "TASKS": "tra.tasks", "RECIPES": "tra.recipes"}
"""What a plug-in may bring, and where the built-in ones are."""

Value = TypeVar("Value")

_loaded: dict[str, ModuleType] = {}
_paths: dict[str, str] = {}
_folders: list[str] = []
_versions: dict[str, str] = {}
_installed_done = False


def load(name: str) -> ModuleType:
    """Import a plug-in, once: the name of a module, or a path ending in .py, which is known by its last part.

    Raises a ValueError if there is no such module, or if it brings a name that is taken, and a RunError with the place
    if it fails itself.
    """
    if not name.endswith(".py"):
        if name not in _loaded:
            _add(name, _import(name))
        return _loaded[name]
    path = Path(name).absolute()
    if path.name not in _loaded:
        _add(path.name, _import_file(path))
        _paths[path.name] = str(path)
    elif _paths.get(path.name) != str(path):
        raise ValueError(f"plugin {name} must have a name of its own: {_paths[path.name]} is loaded already")
    return _loaded[path.name]


def add_folder(folder: str) -> None:
    """Let plug-ins import what lies in a folder, after everything else that can be imported."""
    if folder not in sys.path:
        sys.path.append(folder)
    if folder not in _folders:
        _folders.append(folder)


def folders() -> tuple[str, ...]:
    """Where plug-ins were found: what `add_folder` must be given in a process that is to have the same."""
    return tuple(_folders)


def load_installed() -> None:
    """Load the plug-ins of all installed packages. One that cannot be loaded costs a warning and nothing else."""
    global _installed_done
    if _installed_done:
        return
    _installed_done = True
    for entry in entry_points(group=GROUP):
        try:
            if entry.module not in _loaded:
                _add(entry.module, _import_entry(entry))
            if entry.dist is not None:
                _versions[entry.module] = f"{entry.dist.name} {entry.dist.version}"
        except Exception as error:  # somebody else's module may raise anything
            warnings.warn(f"plug-in {entry.module} is installed and left out: {error}", stacklevel=2)


def installed() -> bool:
    """Whether an installed package brings a plug-in. None is imported."""
    return bool(entry_points(group=GROUP))


def loaded() -> tuple[str, ...]:
    """What `load` must be given in a process that is to have the same plug-ins."""
    return tuple(_paths.get(name, name) for name in _loaded)


def described() -> dict[str, str]:
    """Of every plug-in, the package that it came with or its file, and the names that it brings."""
    load_installed()
    found = {}
    for name, module in _loaded.items():
        names = [entry for kind in KINDS for entry in _of(module, kind)]
        origin = _versions.get(name) or _paths.get(name) or "loaded by name"
        found[name] = f"{origin}: {', '.join(names) or 'no names'}"
    return found


def every(kind: str, built_in: Mapping[str, Value]) -> dict[str, Value]:
    """The built-in names of a kind and those of all plug-ins."""
    load_installed()
    return {**built_in, **{name: value for module in _loaded.values() for name, value in _of(module, kind).items()}}


def find(kind: str, built_in: Mapping[str, Value], name: str, argument: str) -> Value:
    """What a name stands for, or a ValueError that names the argument, the choices and the nearest one."""
    if isinstance(name, str) and name in built_in:
        return built_in[name]
    return lookup(every(kind, built_in), name, argument)


def source(kind: str, name: str) -> str | None:
    """The plug-in that a name comes from, None if it is built in."""
    return next((plugin for plugin, module in _loaded.items() if name in _of(module, kind)), None)


def versions(names: list[str]) -> dict[str, str]:
    """Of each plug-in, the package and version it was installed with, "" for one that was loaded by name."""
    return {name: _versions.get(name, "") for name in names}


def require(names: Any) -> None:
    """Raise a RunError that says how to get them unless these plug-ins, which a file names, are loaded or installed.

    Only installed ones are loaded: what a file says imports nothing.
    """
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"plugins must be a list of names, got {names!r}")
    if names:
        load_installed()
    for name in names:
        if name not in _loaded:
            place = f"PATH/{name}" if name.endswith(".py") else name
            raise RunError(
                f"the plug-in {name} is needed and not loaded: install the package that brings it, or give "
                f"--plugin {place} (in Python: tra.plugins.load({place!r}))"
            )


def _import(name: str) -> ModuleType:
    expected = f"plugin must be the name of a module or a path ending in .py, got {name!r}"
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(expected)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise ValueError(f"{expected}: {error}") from error
        raise RunError(_what_failed(name, error)) from error  # something that the plug-in itself imports
    except Exception as error:
        raise RunError(_what_failed(name, error)) from error


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"plugin must be a file that exists, got {str(path)!r}")
    spec = importlib.util.spec_from_file_location(f"tra_plugin_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # as an import does: dataclasses look themselves up there
    add_folder(str(path.parent))  # as for a script
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        raise RunError(_what_failed(str(path), error)) from error
    return module


def _import_entry(entry: EntryPoint) -> ModuleType:
    if entry.attr:
        raise ValueError(f"its entry point must name a module, got {entry.value!r}")
    return _import(entry.module)


def _what_failed(name: str, error: Exception) -> str:
    """One line: what was raised, and where."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    line, file = (error.lineno, error.filename) if isinstance(error, SyntaxError) else (place.lineno, place.filename)
    said = (str(error).splitlines() or [""])[0]
    return f"plug-in {name} could not be loaded: {type(error).__name__}: {said} ({file}, line {line})"


def _add(name: str, module: ModuleType) -> None:
    """Accept a module whose dicts are as they should be and whose names are all new."""
    for kind in KINDS:
        built_in = _built_in(kind)
        for entry, value in _of(module, kind).items():
            other = "tra" if entry in built_in else source(kind, entry)
            if other is not None:
                raise ValueError(f"plug-in {name} must bring new names, but {other} has {entry!r} in {kind} already")
            _check_value(f"{entry!r} in {kind} of plug-in {name}", kind, value)
    _loaded[name] = module


def _check_value(what: str, kind: str, value: Any) -> None:
    if kind == "MECHANISMS":
        attention = importlib.import_module(KINDS[kind]).Attention
        if not (isinstance(value, type) and issubclass(value, attention)):
            raise ValueError(f"{what} must be a subclass of tra.attention.Attention, got {value!r}")
    elif not callable(value):
        raise ValueError(f"{what} must be a class or a function, got {value!r}")


def _of(module: ModuleType, kind: str) -> dict[str, Any]:
    found = getattr(module, kind, {})
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise ValueError(f"plug-in {module.__name__} must have a dict of names as {kind}, got {type(found).__name__}")
    return found


def _built_in(kind: str) -> Mapping[str, Any]:
    # A plug-in is loaded long after these; their modules import this one.
    return getattr(importlib.import_module(KINDS[kind]), kind)
