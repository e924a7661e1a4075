"""The weights that training begins with, where they come from another model."""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tra.errors import RunError
from tra.files import read_json
from tra.model import Decoder
from tra.runs.folder import find_run

HEAD = "lm_head."
BODY = ("model.decoder.", "decoder.")
"""What precedes the names of a decoder's weights in folders that transformers can load."""


def load_initial_weights(source: str, model: Decoder) -> None:
    """Fill a decoder with the weights of a run, or of a folder that transformers can load.

    Raises a ValueError that names what differs unless every name and shape is the same.
    """
    run = find_run(source)
    if run.exists:
        found = run.checkpoint()
        if found is None:
            raise ValueError(f"init_from must have a checkpoint, but {source} has none")
        stored = found.tensors("model")
    elif list(run.folder.glob("*.safetensors")):
        stored = _of_folder(run.folder)
    else:
        raise ValueError(
            f"init_from must be a run or a folder with a model's config.json and safetensors files, got {source}"
        )
    weights = model.state_dict()
    if model.config.tied_embeddings and "head.weight" not in stored and "embedding.weight" in stored:
        stored["head.weight"] = stored["embedding.weight"]
    unlike = [
        f"{name} is {_shape(stored, name)} there and {_shape(weights, name)} here"
        for name in sorted(stored.keys() | weights.keys())
        if _shape(stored, name) != _shape(weights, name)
    ]
    if unlike:
        more = f", and {len(unlike) - 1} others differ too" if len(unlike) > 1 else ""
        hint = ""
        if run.exists:
            theirs, ours = vars(run.recipe.model), vars(model.config)
            fields = [
                f"model.{name} ({theirs[name]!r}, here {ours[name]!r})" for name in ours if ours[name] != theirs[name]
            ]
            hint = f"; the configs differ in {', '.join(fields)}" if fields else ""
        raise ValueError(f"init_from must fit the model: {unlike[0]}{more} ({source}){hint}")
    model.load_state_dict({name: tensor.to(torch.float32) for name, tensor in stored.items()})


def _shape(tensors: dict[str, Tensor], name: str) -> str:
    return str(list(tensors[name].shape)) if name in tensors else "missing"


def _of_folder(folder: Path) -> dict[str, Tensor]:
    """The weights in a folder of transformers, by the decoder's names for them."""
    try:
        kind = read_json(folder / "config.json").get("model_type")
        stored: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, "pt") as tensors:
                stored |= {name: tensors.get_tensor(name).clone() for name in tensors.keys()}  # noqa: SIM118
    except (AttributeError, OSError, SafetensorError, ValueError) as error:
        raise RunError(f"the weights in {folder} could not be read: {error}") from error
    if not any(name.startswith(BODY) for name in stored):
        raise ValueError(
            f"init_from must hold a decoder of this package, got a model of type {kind!r} in {folder}; an adopted "
            "model is trained with tra adopt MODEL FOLDER --heal TEXT, or with transformers"
        )
    return {_own_name(name): tensor for name, tensor in stored.items()}


def _own_name(name: str) -> str:
    for before in BODY:
        name = name.removeprefix(before)
    return name.replace(HEAD, "head.", 1) if name.startswith(HEAD) else name
