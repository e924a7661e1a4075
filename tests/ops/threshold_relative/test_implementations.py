"""The list of implementations: which one takes a call, what is said of those that do not."""

import warnings
from types import SimpleNamespace

import pytest
import torch

from tests.ops.inputs import random_inputs
from tra.ops import threshold_relative_attention
from tra.ops.threshold_relative import describe_implementations, implementations, op, reference
from tra.ops.threshold_relative.call import Inputs, Options
from tra.ops.threshold_relative.implementations import IMPLEMENTATIONS

INPUTS = random_inputs(dtype=torch.float32)


class Fake:
    """The reference under another name, which counts its calls and refuses for the reason given."""

    def __init__(self, reason: str | None = None) -> None:
        self.reason = reason
        self.calls: list[str] = []

    def about(self) -> str:
        return "a fake"

    def refusal(self, inputs: Inputs, options: Options) -> str | None:
        self.calls.append("refusal")
        return self.reason

    def forward(self, *arguments):  # type: ignore[no-untyped-def]
        self.calls.append("forward")
        return reference.forward(*arguments)

    def backward(self, *arguments):  # type: ignore[no-untyped-def]
        self.calls.append("backward")
        return reference.backward(*arguments)


def install(monkeypatch: pytest.MonkeyPatch, **table: object) -> None:
    for module in (implementations, op):
        monkeypatch.setattr(module, "IMPLEMENTATIONS", table)


def test_the_native_kernel_is_asked_first_and_the_reference_last() -> None:
    assert list(IMPLEMENTATIONS) == ["cpu", "triton", "reference"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_reference_refuses_nothing(dtype: torch.dtype, device: str) -> None:
    tensors = (x.to(device) for x in random_inputs(width=300, dtype=dtype))
    options = Options(scale=1.0, threshold=0.0, straight_through=0.5, dropout=0.5, tolerance=0.0, score_bound=None)
    assert reference.refusal(Inputs(*tensors, None, None, torch.tensor([1]), None, None), options) is None


def test_auto_takes_the_first_that_is_willing(monkeypatch: pytest.MonkeyPatch) -> None:
    unwilling, willing, last = Fake("is asleep"), Fake(), Fake()
    install(monkeypatch, unwilling=unwilling, willing=willing, last=last)
    out = threshold_relative_attention(*INPUTS)
    assert (unwilling.calls, willing.calls, last.calls) == (["refusal"], ["refusal", "forward"], [])
    assert torch.equal(out, threshold_relative_attention(*INPUTS, impl="last"))


def test_one_asked_for_by_name_is_used_or_refused_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    unwilling, willing, last = Fake("is asleep"), Fake(), Fake()
    install(monkeypatch, unwilling=unwilling, willing=willing, last=last)
    threshold_relative_attention(*INPUTS, impl="last")
    assert (unwilling.calls, willing.calls, last.calls) == ([], [], ["refusal", "forward"])
    with pytest.raises(ValueError, match=r"^impl 'unwilling' is asleep$"):
        threshold_relative_attention(*INPUTS, impl="unwilling")
    assert (unwilling.calls, willing.calls) == (["refusal"], [])


def test_a_refusal_sees_the_whole_call(monkeypatch: pytest.MonkeyPatch) -> None:
    class Picky(Fake):
        def refusal(self, inputs: Inputs, options: Options) -> str | None:
            return "takes no dropout" if options.dropout > 0 or inputs.dropout_seed is not None else None

    picky = Picky()
    install(monkeypatch, picky=picky, reference=reference)
    threshold_relative_attention(*INPUTS, dropout=0.1)
    assert picky.calls == []
    threshold_relative_attention(*INPUTS)
    assert picky.calls == ["forward"]
    with pytest.raises(ValueError, match="impl 'picky' takes no dropout"):
        threshold_relative_attention(*INPUTS, dropout=0.1, impl="picky")


def test_one_that_auto_passes_over_may_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    silent, talkative = Fake("is asleep"), Fake("is not installed")
    talkative.passed_over = said.append  # type: ignore[attr-defined]
    install(monkeypatch, silent=silent, talkative=talkative, reference=reference)
    threshold_relative_attention(*INPUTS)
    assert said == ["is not installed"]
    with pytest.raises(ValueError, match="is not installed"):
        threshold_relative_attention(*INPUTS, impl="talkative")
    threshold_relative_attention(*INPUTS, impl="reference")
    assert said == ["is not installed"]


def test_nothing_is_said_of_a_kernel_that_is_there() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = threshold_relative_attention(*random_inputs(dtype=torch.float64))
    assert out.dtype == torch.float64


def test_a_module_and_a_line_add_an_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("about", "refusal", "forward", "backward")
    module = SimpleNamespace(**{name: getattr(Fake(), name) for name in names})
    install(monkeypatch, new=module, **IMPLEMENTATIONS)
    assert list(describe_implementations()) == ["new", "cpu", "triton", "reference"]
    leaves = [[x.clone().requires_grad_() for x in INPUTS] for _ in range(3)]
    for tensors, impl in zip(leaves, ("auto", "new", "reference"), strict=True):
        threshold_relative_attention(*tensors, impl=impl).square().sum().backward()
    for auto, named, expected in zip(*leaves, strict=True):
        assert torch.equal(auto.grad, expected.grad)
        assert torch.equal(named.grad, expected.grad)


def test_every_implementation_says_what_it_is_and_what_it_refuses() -> None:
    described = describe_implementations()
    assert list(described) == list(IMPLEMENTATIONS)
    assert all("refuses" in text and "\n" not in text for text in described.values())
