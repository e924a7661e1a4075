"""Checkpoints: safetensors and JSON in a folder that appears whole or not at all. Nothing is ever unpickled.

checkpoints/step-00000100/model.safetensors, optimizer.safetensors, state.json (step, run, digests)
"""

import hashlib
import os
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from tra.errors import RunError
from tra.files import opened, read_json, remove_folder, remove_partial, write_json, write_tensors, written_aside

FORMAT = 1
STATE = "state.json"
FILES = {"model.safetensors", "optimizer.safetensors"}


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    step: int

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors saved under a name, on the CPU. Copies: the library's own are views of the mapped file, and
        outlive neither its truncation nor its replacement."""
        try:
            stored = load_file(self.path / f"{name}.safetensors")
        except SafetensorError as error:
            raise RunError(f"{name} of checkpoint {self.path} is no intact safetensors file: {error}") from error
        return {key: tensor.clone() for key, tensor in stored.items()}


class Checkpoints:
    """The checkpoints of a run, in a folder of their own.

    Args:
        folder: where they are.
        run: gives what tells the run from others. It is asked when a checkpoint is written or found; one that says
            nothing of its run, as those of version 0.1, may be any run's.
    """

    def __init__(self, folder: Path, run: Callable[[], str | None] = lambda: None) -> None:
        self.folder, self.run = folder, run
        self._damaged: set[Path] = set()
        """Read, and found damaged: they may be replaced, and nothing else may."""

    def save(
        self, step: int, parts: Mapping[str, Mapping[str, Tensor]], keep: int, besides: Collection[int] = ()
    ) -> Checkpoint:
        """Write a checkpoint of named parts, then remove damaged later ones and all but the newest ``keep``, and those
        of the steps ``besides``."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.remove_partial()
        final = self.folder / f"step-{step:08d}"
        try:
            with written_aside(final) as aside:
                aside.mkdir()
                digests = {}
                for name, tensors in parts.items():
                    file = aside / f"{name}.safetensors"
                    write_tensors(file, _apart(tensors))
                    digests[file.name] = _digest(file)
                write_json(aside / STATE, {"format": FORMAT, "step": step, "run": self.run(), "files": digests})
        except (OSError, SafetensorError) as error:
            raise RunError(
                f"could not write the checkpoint of step {step} to {self.folder}: {error}; {self.describe_last()}"
            ) from error
        folders = self._steps()
        here = folders.index(final)
        older = [path for path in folders[here + keep :] if _step_of(path) not in besides]
        for other in [path for path in folders[:here] if path in self._damaged] + older:
            remove_folder(other)
        return Checkpoint(final, step)

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint whose files are all intact, warning about each damaged one passed over.

        One that could not be read may be intact: it is a RunError, because to go on without it would replace it.
        """
        for path in self._steps():
            try:
                return self._verified(path)
            except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
                self._damaged.add(path)
                warnings.warn(f"checkpoint {path} is damaged ({error}): using the one before", stacklevel=2)
            except OSError as error:
                raise RunError(
                    f"checkpoint {path} could not be read ({error}) and may be intact: try again when it can be, or "
                    "move it away to go on from the one before"
                ) from error
        return None

    def of_step(self, step: int) -> Checkpoint:
        """The checkpoint of a step; a ValueError names those that there are unless it is one of them and intact."""
        path = self.folder / f"step-{step:08d}"
        try:
            return self._verified(path)
        except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
            there = ", ".join(str(_step_of(other)) for other in reversed(self._steps())) or "none"
            raise ValueError(
                f"checkpoint must be one of steps {there} in {self.folder}, got {step}: {error}"
            ) from error

    def steps(self) -> list[int]:
        """The steps that there are checkpoints of, newest first, intact or not."""
        return [_step_of(path) for path in self._steps()]

    def remove_after(self, step: int) -> None:
        """Those of later steps, newest first: after a kill the run goes on from what is left."""
        for path in self._steps():
            if _step_of(path) > step:
                remove_folder(path)

    def describe_last(self) -> str:
        """For messages: which checkpoint a run can go on from."""
        with warnings.catch_warnings(action="ignore"):
            try:
                found = self.latest()
            except RunError as error:
                return str(error)
        return f"the last good checkpoint is {found.path}" if found else "there is no earlier checkpoint"

    def remove(self) -> None:
        """All of them: the run can no longer be read or gone on with, and what it measured stays."""
        if self.folder.exists():
            remove_folder(self.folder)

    def remove_partial(self) -> None:
        """Remove what a killed process left half-written."""
        remove_partial(self.folder)

    def _steps(self) -> list[Path]:
        """Newest first. Anything else in the folder, such as a copy somebody made, is left alone."""
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise RunError(f"the checkpoints in {self.folder} could not be read: {error}") from error
        return [self.folder / name for name in sorted(names, reverse=True) if re.fullmatch(r"step-\d{8}", name)]

    def _verified(self, path: Path) -> Checkpoint:
        """A ValueError, KeyError or TypeError if it is damaged."""
        state = read_json(path / STATE)
        if state["format"] != FORMAT:
            raise ValueError(f"its format is {state['format']}, expected {FORMAT}")
        step = _step_of(path)
        if state["step"] != step:
            raise ValueError(f"{STATE} says step {state['step']}")
        of_run, here = state.get("run"), self.run()
        if None not in (of_run, here) and of_run != here:
            raise RunError(f"checkpoint {path} is of a run with another recipe or seed: move it away")
        digests = dict(state["files"])
        if set(digests) != FILES:
            raise ValueError(f"{STATE} must name {' and '.join(sorted(FILES))}, and nothing else")
        for name, digest in digests.items():
            if _digest(path / name) != digest:
                raise ValueError(f"{name} does not match its digest")
        return Checkpoint(path, step)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def weights_of(model: nn.Module, everywhere: bool = False) -> dict[str, Tensor]:
    """The weights of a model, whole, however it is divided among processes. Every process must call this; only the
    first is given the tensors, on the CPU, unless they are wanted everywhere."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    weights: Any = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=not everywhere)
    )
    return weights


def gathered(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """The parts to save, whole and on the CPU, however model and optimizer are divided among processes.

    Every process must call this; only the first is given the tensors. The optimizer's have names such as
    ``exp_avg/blocks.0.mlp.expand.weight``.
    """
    # Imported here, as below: it takes a second that only training should pay.
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    both: Any = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    weights, state = both
    moments = state.get("state", {}).items()
    return {
        "model": weights,
        "optimizer": {f"{kind}/{name}": tensor for name, kinds in moments for kind, tensor in kinds.items()},
    }


def fitting(found: Checkpoint, model: nn.Module) -> dict[str, Tensor]:
    """A checkpoint's weights, which are known to have the names and shapes of the model's."""
    weights, expected = found.tensors("model"), model.state_dict()
    for name in expected.keys() - weights.keys():  # of a tied weight one name is enough
        for other in weights.keys() & expected.keys():
            if expected[other].data_ptr() == expected[name].data_ptr():
                weights[name] = weights[other]
    for name in sorted(weights.keys() | expected.keys()):
        stored, wanted = (list(x[name].shape) if name in x else None for x in (weights, expected))
        if stored != wanted:
            raise RunError(f"checkpoint {found.path} does not fit the run's model: {name} is {stored}, not {wanted}")
    return weights


def restore(found: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put a checkpoint into model and optimizer, each process taking its share. Every process must call this."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict, set_state_dict

    weights: dict[str, Any] = fitting(found, model)
    moments: dict[str, Any] = defaultdict(dict)
    for key, tensor in found.tensors("optimizer").items():
        kind, _, name = key.partition("/")
        if name not in weights:
            raise RunError(f"checkpoint {found.path} does not fit the run's model, which has no weight for {key}")
        moments[name][kind] = tensor
    if not moments:  # before the first step
        set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))
        return
    set_state_dict(
        model,
        optimizer,
        model_state_dict=weights,
        # The names say which of the two of a tied weight the moments are stored under.
        optim_state_dict={"state": moments, "param_groups": [{"params": list(moments)}]},
        options=StateDictOptions(full_state_dict=True),
    )


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, each in memory of its own as the library wants them: tied embeddings share theirs."""
    found: dict[int, str] = {}
    whole = {key: tensor.contiguous() for key, tensor in tensors.items()}
    return {
        key: tensor if found.setdefault(tensor.data_ptr(), key) == key else tensor.clone()
        for key, tensor in whole.items()
    }


def _digest(file: Path) -> str:
    with opened(file) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
