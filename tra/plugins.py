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
import warnings
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from tra.lookup import lookup

GROUP = "tra.plugins"
KINDS = ("MECHANISMS", "TASKS", "RECIPES")

Value = TypeVar("Value")

_loaded: dict[str, ModuleType] = {}
_paths: dict[str, str] = {}
_versions: dict[str, str] = {}
_installed_done = False


def load(name: str) -> ModuleType:
    """Import a plug-in, once: the name of a module, or a path ending in .py, which is known by its last part."""
    known = Path(name).name if name.endswith(".py") else name
    if known not in _loaded:
        _add(known, _import(name))
        if name.endswith(".py"):
            _paths[known] = str(Path(name).absolute())
    return _loaded[known]


def load_installed() -> None:
    """Load the plug-ins of all installed packages. One that cannot be loaded costs a warning and nothing else."""
    global _installed_done
    if _installed_done:
        return
    _installed_done = True
    for entry in entry_points(group=GROUP):
        if entry.module in _loaded:
            continue
        try:
            _add(entry.module, entry.load())
            if entry.dist is not None:
                _versions[entry.module] = f"{entry.dist.name} {entry.dist.version}"
        except Exception as error:  # somebody else's module may raise anything
            warnings.warn(f"plug-in {entry.module} could not be loaded: {error}", stacklevel=2)


def loaded() -> tuple[str, ...]:
    """What `load` must be given in a process that is to have the same plug-ins."""
    return tuple(_paths.get(name, name) for name in _loaded)


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


def require(names: list[str]) -> None:
    """Raise a ValueError unless these plug-ins are loaded, or installed and now loaded."""
    load_installed()
    for name in names:
        if name not in _loaded:
            raise ValueError(
                f"the plug-in {name} is needed and not loaded: install the package that brings it, or give "
                f"--plugin {name} (in Python: tra.plugins.load({name!r}))"
            )


def _import(name: str) -> ModuleType:
    if not name.endswith(".py"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
                raise  # something that the plug-in itself imports
            raise ValueError(f"plugin must be the name of a module or a path ending in .py, got {name!r}") from error
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"plugin must be a file that exists, got {name!r}")
    spec = importlib.util.spec_from_file_location(f"tra_plugin_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # as an import does: dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def _add(name: str, module: ModuleType) -> None:
    for kind in KINDS:
        names = _of(module, kind)
        built_in = _built_in(kind)
        for entry in names:
            other = "tra" if entry in built_in else source(kind, entry)
            if other is not None:
                raise ValueError(f"plug-in {name} must bring new names, but {other} has {entry!r} in {kind} already")
    _loaded[name] = module


def _of(module: ModuleType, kind: str) -> dict[str, Any]:
    found = getattr(module, kind, {})
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise ValueError(f"plug-in {module.__name__} must have a dict of names as {kind}, got {type(found).__name__}")
    return found


def _built_in(kind: str) -> Mapping[str, Any]:
    # A plug-in is loaded long after these; their modules import this one.
    home = {"MECHANISMS": "tra.attention", "TASKS": "tra.tasks", "RECIPES": "tra.recipes"}[kind]
    return getattr(importlib.import_module(home), kind)
