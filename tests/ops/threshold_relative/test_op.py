"""The operator as a citizen of PyTorch: gradients, opcheck, compile, autocast, transforms; what it does not support."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.forward_ad import dual_level, make_dual
from torch.func import grad, hessian, jacrev, jvp, linearize, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.testing import assert_close
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ops.inputs import random_inputs
from tra.attention import ThresholdRelativeAttention
from tra.ops import threshold_relative_attention
from tra.ops.threshold_relative import cpu
from tra.ops.threshold_relative.call import Inputs, Options
from tra.ops.threshold_relative.implementations import IMPLEMENTATIONS
from tra.ops.threshold_relative.op import operators, python_operators


def test_the_kernel_takes_the_arguments_in_the_order_of_the_call() -> None:
    """A schema and TORCH_BOX see types alone: two tensors in another order would not be noticed."""
    source = (Path(cpu.__file__).parent / "op.cpp").read_text()
    macro = source.split("#define TRA_ARGUMENTS(AS)")[1].split("#define")[0]
    assert tuple(re.findall(r"AS\([^,]+, (\w+)\)", macro)) == Inputs._fields + Options._fields


def with_gradients(inputs: tuple[Tensor, ...]) -> list[Tensor]:
    return [x.requires_grad_() for x in inputs]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"threshold": 0.2, "scale": 0.5},
        {"threshold": -0.3},
        {"key_mask": torch.tensor([[False, True, True, True, True, False, True, True, True]] * 2)},
        {"segment_ids": torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2]] * 2)},
        {"dropout": 0.4},
    ],
    ids=lambda options: ",".join(options) or "plain",
)
@pytest.mark.parametrize(
    "shape", [{}, {"kv_heads": 2, "queries": 4, "keys": 9, "value_width": 3}], ids=["self", "decode"]
)
def test_gradients_of_the_reference_equal_finite_differences(shape: dict[str, int], options: dict[str, object]) -> None:
    inputs = with_gradients(random_inputs(**{"queries": 9, "width": 4, **shape}))

    def seeded(*tensors: Tensor) -> Tensor:
        torch.manual_seed(3)
        return threshold_relative_attention(*tensors, impl="reference", **options)

    assert torch.autograd.gradcheck(seeded, inputs, fast_mode=True)


@pytest.mark.parametrize("impl", sorted(IMPLEMENTATIONS))
@pytest.mark.parametrize("masked", [False, True])
def test_opcheck_finds_nothing(impl: str, masked: bool) -> None:
    dtype = torch.float64 if impl == "reference" else torch.float32
    inputs = random_inputs(1, 2, 1, queries=5, keys=9, dtype=dtype)
    masks = (torch.rand(1, 9) < 0.8, torch.zeros(1, 9, dtype=torch.int64)) if masked else (None, None)
    seed = torch.tensor([12345]) if masked else None
    rows = (torch.randn(1, 2, 5), torch.full((1, 2, 5), 50.0)) if masked else (None, None)
    numbers = (0.3, 0.0, 0.5 if masked else 0.0, 0.2 if masked else 0.0, 0.0, None)
    ops = operators(impl)
    torch.library.opcheck(ops.forward, (*inputs, *masks, seed, *rows, None, *numbers, True))
    result = ops.forward(*inputs, *masks, seed, *rows, None, *numbers, True)
    for wants in ((True, True, True), (True, False, False)):
        arguments = (torch.randn_like(result[0]), *result, *wants, *inputs, *masks, seed, *rows, None, *numbers)
        torch.library.opcheck(ops.backward, arguments)


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_gradients_that_nobody_wants_are_left_out_and_the_others_do_not_change(impl: str) -> None:
    whole = with_gradients(random_inputs(dtype=torch.float32))
    threshold_relative_attention(*whole, impl=impl, straight_through=0.5).square().sum().backward()
    for wanted in range(4):
        some = [x.detach().requires_grad_(n == wanted) for n, x in enumerate(whole)]
        threshold_relative_attention(*some, impl=impl, straight_through=0.5).square().sum().backward()
        for n, (one, other) in enumerate(zip(some, whole, strict=True)):
            assert torch.equal(one.grad, other.grad) if n == wanted else one.grad is None


@pytest.mark.parametrize("impl", sorted(IMPLEMENTATIONS))
def test_compiles_without_graph_breaks_for_any_length(impl: str) -> None:
    compiled = torch.compile(threshold_relative_attention, fullgraph=True, dynamic=True)
    for length in (7, 12, 31):
        eager = with_gradients(random_inputs(heads=2, queries=length, dtype=torch.float32))
        traced = with_gradients(random_inputs(heads=2, queries=length, dtype=torch.float32))
        mask = torch.rand(2, length) < 0.8
        expected = threshold_relative_attention(*eager, key_mask=mask, impl=impl)
        actual = compiled(*traced, key_mask=mask, impl=impl)
        assert_close(actual, expected)
        expected.square().sum().backward()
        actual.square().sum().backward()
        for left, right in zip(traced, eager, strict=True):
            assert_close(left.grad, right.grad)


def test_compiles_with_dropout() -> None:
    compiled = torch.compile(threshold_relative_attention, fullgraph=True, dynamic=True)
    inputs = random_inputs(dtype=torch.float32)
    torch.manual_seed(1)
    first, second = compiled(*inputs, dropout=0.5), compiled(*inputs, dropout=0.5)
    torch.manual_seed(1)
    assert torch.equal(compiled(*inputs, dropout=0.5), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("impl", sorted(IMPLEMENTATIONS))
def test_autocast_lowers_the_inputs_and_nothing_else(impl: str) -> None:
    query, key, value, log_gate = random_inputs(dtype=torch.float32)
    lowered = [x.bfloat16() for x in (query, key, value)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = threshold_relative_attention(query, key.bfloat16(), value, log_gate, impl=impl)
    # Inside the operator autocast is off: the products are those of float32.
    assert torch.equal(out, threshold_relative_attention(*lowered, log_gate, impl=impl))


def test_autocast_reaches_gradients() -> None:
    inputs = with_gradients(random_inputs(dtype=torch.float32))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        threshold_relative_attention(*inputs).float().sum().backward()
    assert all(x.grad.dtype == torch.float32 and x.grad.isfinite().all() for x in inputs)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("impl", sorted(IMPLEMENTATIONS))
def test_runs_on_the_meta_device_shapes(impl: str, mode: Callable[[], Any]) -> None:
    query, key, value, log_gate = (x.to("meta") for x in random_inputs(value_width=3, dtype=torch.bfloat16))
    with mode():
        out = threshold_relative_attention(query, key, value, log_gate, impl=impl)
    assert out.shape == (2, 4, 17, 3)
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize("impl", sorted(IMPLEMENTATIONS))
def test_public_function_runs_on_fake_tensors(impl: str) -> None:
    with FakeTensorMode() as mode:
        inputs = [mode.from_tensor(x) for x in random_inputs(dtype=torch.float32)]
        assert threshold_relative_attention(*inputs, impl=impl).shape == (2, 4, 17, 8)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_positive_gate_is_an_error_wherever_there_is_data(compiled: bool) -> None:
    query, key, value, log_gate = random_inputs(dtype=torch.float32)
    log_gate[1, 2, 3] = 0.25
    function = torch.compile(threshold_relative_attention, fullgraph=True) if compiled else threshold_relative_attention
    with pytest.raises(ValueError, match=r"log_gate must never be positive, got a maximum of 0\.25"):
        function(query, key, value, log_gate)


@pytest.fixture(params=sorted(IMPLEMENTATIONS))
def attend(request: pytest.FixtureRequest) -> Callable[[Tensor], Tensor]:
    """The operator as a function of its query alone."""
    _, *others = random_inputs(heads=2, dtype=torch.float32)
    return lambda query: threshold_relative_attention(query, *others, impl=request.param)


QUERY = random_inputs(heads=2, dtype=torch.float32, seed=1)[0]


def plain_gradient(function: Callable[[Tensor], Tensor]) -> Tensor:
    leaf = QUERY.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(function(leaf), leaf)
    return gradient


def test_functional_gradients_are_those_of_autograd(attend: Callable[[Tensor], Tensor]) -> None:
    def loss(query: Tensor) -> Tensor:
        return attend(query).square().sum()

    expected = plain_gradient(loss)
    assert expected.abs().max() > 0
    assert torch.equal(grad(loss)(QUERY), expected)
    out, pull = vjp(attend, QUERY)
    assert torch.equal(pull(2 * out)[0], expected)
    # An inner gradient that the operator has no part in does not hide the outer one.
    nested = grad(lambda query: grad(lambda factor: (attend(query) * factor).sum())(out).square().sum())(QUERY)
    assert torch.equal(nested, expected)


def test_compiling_a_functional_gradient_raises(attend: Callable[[Tensor], Tensor]) -> None:
    # PyTorch compiles the gradients of autograd; within torch.func's transforms it asks operators for more than the
    # public way of registering them gives.
    with pytest.raises(Exception, match="functorch"):
        torch.compile(gradient_of(attend), fullgraph=True)(QUERY)


def test_a_graph_of_the_gradient_may_be_made(attend: Callable[[Tensor], Tensor]) -> None:
    leaf = QUERY.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(attend(leaf).square().sum(), leaf, create_graph=True)
    assert torch.equal(gradient, plain_gradient(lambda query: attend(query).square().sum()))


TANGENT = torch.ones_like(QUERY)


def with_dual_numbers(attend: Callable[[Tensor], Tensor], leaf: Tensor) -> Tensor:
    with dual_level():
        return attend(make_dual(leaf, TANGENT))


def twice(attend: Callable[[Tensor], Tensor]) -> Tensor:
    leaf = QUERY.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(attend(leaf).sum(), leaf, create_graph=True)
    return torch.autograd.grad(gradient.sum(), leaf)[0]


def gradient_of(attend: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return grad(lambda query: attend(query).square().sum())


FORWARD_MODE = "forward-mode differentiation"
UNSUPPORTED: dict[str, tuple[str, Callable[[Callable[[Tensor], Tensor]], object]]] = {
    "jvp": (FORWARD_MODE, lambda attend: jvp(attend, (QUERY,), (TANGENT,))),
    "dual numbers": (FORWARD_MODE, lambda attend: with_dual_numbers(attend, QUERY)),
    "dual leaf": (FORWARD_MODE, lambda attend: with_dual_numbers(attend, QUERY.clone().requires_grad_())),
    "linearize": (FORWARD_MODE, lambda attend: linearize(attend, QUERY)),
    "jvp of the pullback": (FORWARD_MODE, lambda attend: jvp(vjp(attend, QUERY)[1], (QUERY,), (TANGENT,))),
    "jvp of the gradient": (FORWARD_MODE, lambda attend: jvp(gradient_of(attend), (QUERY,), (TANGENT,))),
    "gradient of the jvp": (
        FORWARD_MODE,
        lambda attend: grad(lambda query: jvp(attend, (query,), (TANGENT,))[1].sum())(QUERY),
    ),
    "hessian": (FORWARD_MODE, lambda attend: hessian(lambda query: attend(query).sum())(QUERY)),
    "vmap": ("torch.vmap", lambda attend: vmap(attend)(QUERY[None])),
    "gradient per example": ("torch.vmap", lambda attend: vmap(gradient_of(attend))(QUERY[None])),
    "jacobian": ("torch.vmap", lambda attend: jacrev(attend)(QUERY)),
    "double backward": ("double backward", twice),
    "gradient of the gradient": (
        "double backward",
        lambda attend: grad(lambda query: gradient_of(attend)(query).sum())(QUERY),
    ),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_is_not_supported_raises_instead_of_returning_a_number(
    attend: Callable[[Tensor], Tensor], name: str
) -> None:
    what, attempt = UNSUPPORTED[name]
    with pytest.raises(NotImplementedError, match=f"threshold_relative_attention does not support {what}"):
        attempt(attend)


def test_vmap_over_the_gate_raises_too() -> None:
    query, key, value, log_gate = random_inputs(dtype=torch.float32)
    with pytest.raises(NotImplementedError, match=r"does not support torch\.vmap"):
        vmap(lambda gate: threshold_relative_attention(query, key, value, gate))(log_gate[None])


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_compiling_forward_mode_raises_too(attend: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(Exception, match="does not support forward-mode"):
        torch.compile(lambda query: jvp(attend, (query,), (TANGENT,))[1], fullgraph=True)(QUERY)


def test_a_constant_under_a_transform_is_computed_as_ever(attend: Callable[[Tensor], Tensor]) -> None:
    constant = attend(QUERY)
    scaled = vmap(lambda factor: factor * attend(QUERY))(torch.tensor([1.0, 2.0]))
    assert torch.equal(scaled, torch.stack([constant, 2 * constant]))


MASKS = {"key_mask": torch.rand(2, 17) < 0.8, "segment_ids": torch.arange(17).expand(2, 17) // 9}


@pytest.mark.parametrize("impl", sorted(IMPLEMENTATIONS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recording_gradients_changes_no_bit(impl: str, dtype: torch.dtype) -> None:
    inputs = random_inputs(dtype=dtype, queries=5, keys=17, kv_heads=2)
    plain = threshold_relative_attention(*inputs, **MASKS, impl=impl)
    recorded = threshold_relative_attention(*with_gradients(inputs), **MASKS, impl=impl)
    assert recorded.requires_grad
    assert torch.equal(plain, recorded)
    assert plain.is_contiguous()


class Seen(TorchDispatchMode):
    """The operators that reach a dispatch mode."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class SeenFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Seen, SeenFunctions])
@torch.no_grad()
def test_modes_see_the_operator(mode: Callable[[], Seen | SeenFunctions]) -> None:
    inputs = random_inputs(dtype=torch.float32)
    with mode() as seen:
        out = threshold_relative_attention(*inputs)
    assert any("threshold_relative_attention" in name for name in seen.names)
    assert torch.equal(out, threshold_relative_attention(*inputs))


@torch.no_grad()
def test_a_profiler_sees_the_operator() -> None:
    inputs = random_inputs(dtype=torch.float32)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen:
        out = threshold_relative_attention(*inputs)
    assert f"tra::threshold_relative_attention_{cpu.variant}" in {event.key for event in seen.key_averages()}
    assert torch.equal(out, threshold_relative_attention(*inputs))


class Logged(Tensor):
    """A subclass without a dispatch of its own."""


def with_a_negative_bit(query: Tensor) -> Tensor:
    return torch._neg_view(-query)


@pytest.mark.parametrize("special", [with_a_negative_bit, lambda query: query.as_subclass(Logged)])
@torch.no_grad()
def test_special_tensors_are_read_as_what_they_are(special: Callable[[Tensor], Tensor]) -> None:
    query, *others = random_inputs(dtype=torch.float32)
    out = threshold_relative_attention(special(query), *others)
    assert type(out) is type(special(query))
    assert torch.equal(out.as_subclass(Tensor), threshold_relative_attention(query, *others))


@torch.no_grad()
def test_autocast_is_seen_without_gradients_too() -> None:
    query, key, value, log_gate = random_inputs(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = threshold_relative_attention(query, key, value, log_gate)
    lowered = [x.bfloat16() for x in (query, key, value)]
    assert torch.equal(out, threshold_relative_attention(*lowered, log_gate))


@torch.no_grad()
def test_graphs_hold_the_operator() -> None:
    inputs = random_inputs(dtype=torch.float32)
    expected = threshold_relative_attention(*inputs)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch.compile(Attend(), backend=backend, fullgraph=True)(*inputs)
    graphs += [torch.export.export(Attend(), inputs, strict=strict).module() for strict in (False, True)]
    graphs.append(make_fx(Attend())(*inputs))
    for graph in graphs:
        held = {python_operators("cpu").forward, operators("cpu").forward}  # make_fx runs eager code
        assert held & {node.target for node in graph.graph.nodes}
        (out,) = pytree.tree_leaves(graph(*inputs))
        assert torch.equal(out, expected)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@torch.no_grad()
def test_dual_numbers_are_refused_without_gradients_too() -> None:
    query, *others = random_inputs(dtype=torch.float32)
    with dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        threshold_relative_attention(make_dual(query, torch.ones_like(query)), *others)


class Attend(nn.Module):
    def forward(self, *inputs: Tensor) -> Tensor:
        return threshold_relative_attention(*inputs)


@pytest.mark.parametrize("other", [torch.float64, torch.bfloat16])
def test_the_kernel_refuses_dtypes_that_it_cannot_read(other: torch.dtype) -> None:
    query, key, value, log_gate = random_inputs(dtype=torch.float32)
    call = (key, value.to(other), log_gate, *[None] * 6, 1.0, 0.0, 0.0, 0.0, 0.0, None, False)
    with pytest.raises(RuntimeError, match="query, key and value must have one dtype"):
        cpu.operators().forward(query, *call)


@pytest.mark.parametrize(
    "place, wrong, message",
    [
        (1, (2, 3, 6, 5), r"key must have the shape \[2, 3, 6, 4\]"),
        (2, (2, 3, 5, 4), r"value must have the shape"),
        (3, (2, 3, 5), r"log_gate must have the shape"),
        (4, (2, 5), r"key_mask must have the shape"),
        (5, (1, 6), r"segment_ids must have the shape"),
        (7, (2, 3, 1), r"row_threshold must have the shape"),
        (8, (3, 6), r"row_bound must have the shape"),
        (9, (3,), r"key_lengths must have the shape"),
    ],
)
def test_the_kernel_refuses_shapes_that_it_would_read_past(place: int, wrong: tuple[int, ...], message: str) -> None:
    """A graph that was traced or stored hands them over without the checks of the public function."""
    query, key, value = torch.randn(3, 2, 3, 6, 4).unbind()
    call = [query, key, value, -torch.rand(2, 3, 6), *[None] * 6, 1.0, 0.0, 0.0, 0.0, 0.0, None, False]
    dtype = {4: torch.bool, 5: torch.int64, 9: torch.int32}.get(place, torch.float32)
    call[place] = torch.zeros(wrong).to(dtype)
    with pytest.raises(RuntimeError, match=message):
        cpu.operators().forward(*call)
    call[place] = None if place > 3 else call[place]
    call[4] = torch.ones(2, 6)
    with pytest.raises(RuntimeError, match="key_mask must be boolean"):
        cpu.operators().forward(*call)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_exported_graphs_raise_instead_of_returning_a_number() -> None:
    query, *others = random_inputs(dtype=torch.float32)
    graph = torch.export.export(Attend(), (query, *others)).module()
    with dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        graph(make_dual(query, torch.ones_like(query)), *others)
    leaf = query.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(graph(leaf, *others).square().sum(), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        torch.autograd.grad(gradient.sum(), leaf)


@pytest.mark.filterwarnings("ignore")  # of tracing, which is deprecated and says much
def test_a_layer_that_learns_through_its_threshold_can_be_traced() -> None:
    layer, x = ThresholdRelativeAttention(32, 4, straight_through=0.5).eval(), torch.randn(1, 7, 32)
    traced = torch.jit.trace(layer, x)
    assert_close(traced(x), layer(x), rtol=0.0, atol=0.0)


def test_graphs_name_no_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = random_inputs(dtype=torch.float32)
    graph = torch.export.export(Attend(), inputs).module()
    names = {str(node.target) for node in graph.graph.nodes}
    assert not [name for name in names if any(variant in name for variant in cpu.VARIANTS)]
    monkeypatch.setattr(cpu, "unusable", "is not built")  # on another machine
    assert_close(graph(*inputs), threshold_relative_attention(*inputs, impl="reference"), rtol=0.0, atol=0.0)


@pytest.mark.parametrize("temperature", [-1.0, 1e-30, float("nan"), float("inf")])
def test_a_temperature_that_gradients_cannot_be_divided_by_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match="straight_through must be 0 or a temperature of at least 1e-15"):
        threshold_relative_attention(*random_inputs(), straight_through=temperature)


@torch.no_grad()
def test_a_positive_gate_beside_one_that_is_not_a_number_is_an_error() -> None:
    query, key, value, log_gate = random_inputs(dtype=torch.float32)
    log_gate[0, 0, 0], log_gate[1, 2, 3] = float("nan"), 0.25
    with pytest.raises(ValueError, match="log_gate must never be positive"):
        threshold_relative_attention(query, key, value, log_gate)
