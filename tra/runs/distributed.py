"""How a run is spread over processes and devices, and who else is told how it goes: all through accelerate."""

import atexit
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.state import DistributedType, PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from accelerate.utils import FullyShardedDataParallelPlugin, broadcast_object_list, parse_flag_from_env

from tra.attention.base import NOT_SHARED
from tra.attention.naming import find_mechanisms
from tra.distributed import ContextParallel, context_parallel
from tra.lookup import lookup
from tra.model import Block, Decoder
from tra.progress import hidden

Value = TypeVar("Value")

TRACKERS = tuple(sorted(LOGGER_TYPE_TO_CLASS))
"""The names of the trackers that accelerate knows."""


def make_accelerator(folder: Path | None = None, track: Sequence[str] = (), device: str | None = None) -> Accelerator:
    """Accelerate's view of this process: alone, or one of those that torchrun or accelerate launch started.

    Trackers write to the folder. The device is the accelerator if there is one, unless "cpu" is asked for. What
    accelerate knows of precision belongs to the process, and each run has its own: the training step sees to that.
    """
    check_trackers(track)
    cpu = device == "cpu" or not torch.accelerator.is_available()
    sharding = _sharding() if parse_flag_from_env("ACCELERATE_USE_FSDP") else None
    accelerator = Accelerator(
        cpu=cpu,
        mixed_precision="no",
        fsdp_plugin=sharding,
        log_with=list(track) or None,
        project_dir=folder,
    )
    if sharding is not None and accelerator.distributed_type == DistributedType.MULTI_CPU:
        # Accelerate shards on accelerators alone and would give replicas in silence; PyTorch shards on the CPU too.
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = sharding
        PartialState().distributed_type = DistributedType.FSDP
    if accelerator.num_processes > 1:
        atexit.register(accelerator.state.destroy_process_group)
    return accelerator


def check_sharing(attention: str, count: int, processes: int) -> None:
    """Raise a ValueError unless so many of the processes can share each sequence of a model with these mechanisms."""
    if count < 1 or processes % count:
        raise ValueError(f"context_parallel must divide the number of processes, {processes}, got {count}")
    for mechanism in find_mechanisms(attention):
        if count > 1 and mechanism.revises_cache:
            raise ValueError(
                f"context_parallel must be 1 for {attention}, got {count}: {mechanism.__name__} cannot share "
                f"sequences, because {NOT_SHARED}"
            )


def share_sequences(model: Decoder, device: torch.device, count: int, processes: int) -> ContextParallel | None:
    """Groups of so many processes that share each sequence: a mesh of data parallel x context parallel."""
    check_sharing(model.config.attention, count, processes)
    if count == 1:
        return None
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(device.type, (processes // count, count), mesh_dim_names=("data", "context"))
    return ContextParallel(mesh["context"])


@contextmanager
def shared_prompt(model: Decoder, count: int) -> Iterator[bool]:
    """Within this, the processes that torchrun started read a prompt together; whether this is the first of them."""
    if count == 1:
        yield True
        return
    with process_group() as is_first:
        processes = PartialState().num_processes
        if processes != count:
            raise ValueError(f"context_parallel must be the number of processes, {processes}, got {count}")
        with context_parallel(share_sequences(model, model.embedding.weight.device, count, processes)):
            yield is_first


@contextmanager
def process_group() -> Iterator[bool]:
    """Join the other processes where torchrun or accelerate launch started several; whether this is the first of them,
    the one that speaks and writes."""
    state = PartialState(cpu=not torch.accelerator.is_available())
    try:
        with nullcontext() if state.is_main_process else hidden():
            yield state.is_main_process
    finally:
        state.destroy_process_group()


def agreed(here: Value) -> Value:
    """What the first process says: what each finds on disk may depend on when it looks."""
    return broadcast_object_list([here])[0]


def check_trackers(track: Sequence[str]) -> None:
    """Raise a ValueError for a tracker that accelerate does not know or whose library is not installed."""
    from accelerate.tracking import get_available_trackers

    installed = {str(name) for name in get_available_trackers()}
    for name in track:
        lookup(dict.fromkeys(TRACKERS), name, "track")
        if name not in installed:
            raise ValueError(f"track must name an installed tracker: {name} is not, pip install {name}")


def _sharding() -> FullyShardedDataParallelPlugin:
    """How FSDP divides a decoder: block by block."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[Block.__name__],
        cpu_ram_efficient_loading=False,  # every process draws the same weights: nothing to send around
        # The precision of a recipe is autocast, sharded or not: weights and the sum of gradients stay float32.
        mixed_precision_policy=MixedPrecisionPolicy(),
    )
