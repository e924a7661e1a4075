"""Every mechanism computes in sequences that processes share what it computes in one process."""

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from torch.testing import assert_close

from tests.distributed.processes import run
from tra.attention import MECHANISMS
from tra.model import Decoder, DecoderConfig

EDGES = [0, 13, 14, 37]
"""Of shards: unequal, one of a single token, and one in the middle, which gets keys and sends some."""
SHARED = [name for name, rule in MECHANISMS.items() if not rule.revises_cache]
CASES = [
    *((name, masked, False) for name in (*SHARED, "rope+tra", "path+fot+tra-learned") for masked in (False, True)),
    ("rope+tra", True, True),
]
"""Attention, whether there are padding and packed documents, and whether backward computes blocks again."""


def model_of(attention: str, again: bool = False) -> Decoder:
    """In float64, so that nothing but an error is larger than rounding."""
    torch.manual_seed(0)
    layers = 3 if attention.count("+") == 2 else 2
    config = DecoderConfig(vocabulary=11, layers=layers, heads=2, width=16, dropout=0.0, attention=attention)
    model = Decoder(config).double()
    model.checkpoint_blocks = again
    # Some begin at zero, of which a product would hide an error.
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model.train()


def batch(masked: bool) -> dict[str, Tensor]:
    rng, place = torch.Generator().manual_seed(1), torch.arange(EDGES[-1])
    found = {"tokens": torch.randint(11, (2, EDGES[-1]), generator=rng)}
    found["targets"] = found["tokens"].roll(-1, 1).masked_fill(found["tokens"] == 3, -100)
    if masked:
        found["key_mask"] = place.expand(2, -1) >= torch.tensor([[0], [5]])
        found["targets"] = found["targets"].masked_fill(~found["key_mask"], -100)
        found["segment_ids"] = place // torch.tensor([[11], [20]])
    return found


def measured(model: Decoder, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """The loss, and the gradient of every parameter."""
    targets = given.pop("targets")
    loss = F.cross_entropy(model(**given).flatten(0, 1), targets.flatten(), reduction="sum")  # the model's is float32
    loss.backward()
    return {"loss": loss.detach(), **{name: x.grad for name, x in model.named_parameters() if x.grad is not None}}


TRAINING = """
from safetensors.torch import save_file
from tests.distributed.test_mechanisms import CASES, EDGES, batch, measured, model_of
from tra.distributed import ContextParallel, context_parallel
shards = ContextParallel(timeout=200, chunk=4)
own = slice(EDGES[rank], EDGES[rank + 1])
for number, (attention, masked, again) in enumerate(CASES):
    with context_parallel(shards):
        found = measured(model_of(attention, again), {name: x[:, own] for name, x in batch(masked).items()})
    save_file(found, folder / f"{number}-{rank}.safetensors")
dist.barrier()
"""


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Tensor]]]:
    """What three processes found, for each case and rank."""
    folder = tmp_path_factory.mktemp("parts")
    run(TRAINING, 3, folder)
    return [[load_file(folder / f"{case}-{rank}.safetensors") for rank in range(3)] for case in range(len(CASES))]


@pytest.mark.parametrize("number", range(len(CASES)), ids=["-".join(map(str, case)) for case in CASES])
def test_the_loss_and_every_gradient_are_those_of_one_process(
    parts: list[list[dict[str, Tensor]]], number: int
) -> None:
    attention, masked, _ = CASES[number]
    expected = measured(model_of(attention), batch(masked))
    for name, whole in expected.items():
        found = sum(part[name] for part in parts[number])
        assert_close(found, whole, rtol=1e-9, atol=1e-11, msg=lambda said, name=name: f"{name}: {said}")
