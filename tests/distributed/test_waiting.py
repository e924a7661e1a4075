"""What a process does while it waits for a neighbour, and how long it waits for one that never answers."""

import pytest

from tests.distributed.processes import run

PROGRAM = """
import time
from tra.distributed import ContextParallel
from tra.distributed.attention import sharded_attention
from tra.errors import RunError
from tra.ops.threshold_relative.pieces import Walk

def wait_until(condition):
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)

class Watched(ContextParallel):
    coming = None
    def receive(self, tensor, peer):
        if tensor.is_floating_point():  # keys and values
            self.coming = tensor.fill_(float("nan"))
        return super().receive(tensor, peer)

shards, visit, before = Watched(timeout=100, chunk=64), Walk.visit, []
def slow_visit(walk, piece):
    if not before and rank == 1:
        before.append(shards.coming.isnan().any().item())
        wait_until(lambda: not shards.coming.isnan().any())
    visit(walk, piece)

Walk.visit = slow_visit
query, gate = torch.randn(1, 2, 64, 8), -torch.full((1, 2, 64), 0.01)
sharded_attention(shards, shards.layout(query[:, 0]), query, query, query, gate, score_bound=30.0)
print("the keys of the neighbour came during the walk over its own" if rank == 1 and before else "")

alone = ContextParallel(dist.new_group([0, 1]), timeout=2)
if rank == 0:
    began = time.monotonic()
    try:
        alone.layout(query[:, 0])
    except RunError as error:
        print(error)
    print("soon" if time.monotonic() - began < 30 else "late")
    (folder / "refused").touch()
wait_until((folder / "refused").exists)
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    return [out.splitlines() for out in run(PROGRAM, 2, tmp_path_factory.mktemp("two"))]


def test_keys_travel_while_a_process_walks_its_own(said: list[list[str]]) -> None:
    """The walk goes on only when they are there."""
    assert said[1][0] == "the keys of the neighbour came during the walk over its own"


def test_a_neighbour_that_never_answers_is_named_within_the_time_given(said: list[list[str]]) -> None:
    assert "rank 1 of the 2 processes that share a sequence is gone or gave no answer within 2 s" in said[0][1]
    assert said[0][2] == "soon"
