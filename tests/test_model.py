import json
import math
import subprocess
import sys
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import tra.model
from tra import MECHANISMS, Decoder, DecoderConfig, sized
from tra.attention import Context


def small(attention: str = "tra", dtype: torch.dtype = torch.float64, **changes: object) -> Decoder:
    config = DecoderConfig(vocabulary=11, layers=2, heads=4, width=32, attention=attention, **changes)
    return Decoder(config).to(dtype).eval()


def parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    "size, attention, expected",
    [
        ("mini", "tra", 2_637_072),  # the authors' code
        ("mini", "rope", 2_637_072 - 4 * (256 * 4 + 4)),  # less the gates
        ("medium", "tra", 72_500_800),
        ("medium", "rope", 72_500_800 - 8 * (512 * 8 + 8)),
    ],
)
def test_parameter_counts(size: str, attention: str, expected: int) -> None:
    with torch.device("meta"):
        assert parameters(Decoder(sized(size, attention=attention))) == expected


def test_state_dict_names_explain_themselves() -> None:
    names = set(small().state_dict())
    block = {
        "attention_norm.weight",
        "attention.query.weight",
        "attention.key.weight",
        "attention.value.weight",
        "attention.gate.weight",
        "attention.gate.bias",
        "attention.output.weight",
        "attention.output.bias",
        "mlp_norm.weight",
        "mlp.expand.weight",
        "mlp.expand.bias",
        "mlp.contract.weight",
        "mlp.contract.bias",
    }
    expected = {"embedding.weight", "norm.weight", "head.weight"}
    assert names == expected | {f"blocks.{layer}.{name}" for layer in range(2) for name in block}


def test_initialisation_is_the_papers() -> None:
    model = Decoder(sized("mini", vocabulary=500))
    assert model.embedding.weight.abs().max() <= 0.01
    assert model.embedding.weight.std().item() == pytest.approx(0.02 / 12**0.5, rel=0.02)
    assert model.head.weight.std().item() == pytest.approx(0.02, rel=0.02)


def test_tied_embeddings_are_one_tensor_that_begins_as_a_head_does() -> None:
    config = sized("mini", vocabulary=2_000, tied_embeddings=True)
    model = Decoder(config)
    assert model.head.weight is model.embedding.weight
    assert 0.0195 < model.head.weight.std() < 0.0205
    plain = Decoder(replace(config, tied_embeddings=False))
    assert sum(x.numel() for x in plain.parameters()) - sum(x.numel() for x in model.parameters()) == 2_000 * 256
    tokens = torch.randint(2_000, (2, 5))
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(tokens), model.hidden(tokens) @ model.embedding.weight.T)


@torch.no_grad()
def test_residual_is_added_to_the_normalised_stream_or_to_the_stream() -> None:
    x = torch.randn(1, 5, 32, dtype=torch.float64)
    for residual in ("normalised", "pre_norm"):
        block = small(residual=residual).blocks[0]

        def norm(y: torch.Tensor) -> torch.Tensor:
            return y / (y.square().mean(-1, keepdim=True) + torch.finfo(y.dtype).eps).sqrt()

        base = norm(x) if residual == "normalised" else x
        middle = base + block.attention(norm(x))
        value, gate = block.mlp.expand(norm(middle)).chunk(2, dim=-1)
        end = norm(middle) if residual == "normalised" else middle
        expected = end + block.mlp.contract(value * gate * torch.sigmoid(gate))
        assert_close(block(x, Context()), expected)


@pytest.mark.parametrize("attention", sorted(MECHANISMS))
@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("padded", [False, True], ids=["plain", "left padded"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@torch.no_grad()
def test_prefill_in_pieces_and_decoding_equal_the_full_forward(
    attention: str, batch: int, padded: bool, dtype: torch.dtype
) -> None:
    model = small(attention, dtype, kv_heads=2)
    tokens = torch.randint(11, (batch, 23))
    mask = None
    if padded:
        mask = torch.arange(23) >= torch.arange(batch)[:, None] * 3 + 2
    full = model(tokens, key_mask=mask)
    for pieces in ([23], [9, 6, 8], [12] + [1] * 11, [1] * 23):
        cache, parts, seen = model.new_cache(), [], 0
        for piece in tokens.split(pieces, dim=1):
            seen += piece.shape[1]
            parts.append(model(piece, cache=cache, key_mask=None if mask is None else mask[:, :seen]))
        assert_close(torch.cat(parts, dim=1), full, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attention", sorted(MECHANISMS))
@torch.no_grad()
def test_left_padding_does_not_change_the_real_tokens(attention: str) -> None:
    model = small(attention)
    tokens = torch.randint(11, (3, 12))
    padded = torch.cat([torch.randint(11, (3, 5)), tokens], dim=1)
    mask = (torch.arange(17) >= 5).expand(3, 17)
    assert_close(model(padded, key_mask=mask)[:, 5:], model(tokens))


@pytest.mark.parametrize("attention", ["tra", "rope", "cope"])  # the operator, SDPA, dense; each takes long to compile
def test_compiles_and_trains_without_graph_breaks(attention: str) -> None:
    torch._dynamo.reset()
    model = small(attention, dropout=0.1).train()
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for length in (9, 13):
        compiled(torch.randint(11, (2, length))).square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    model.eval()
    tokens = torch.randint(11, (2, 9))
    assert_close(compiled(tokens), model(tokens))


@torch.no_grad()
def test_kernel_in_the_model_equals_the_reference_in_double_precision() -> None:
    """The module's bound on the scores and its tolerance are right where the kernel relies on them."""
    double = small()
    single = small(dtype=torch.float32)
    single.load_state_dict(double.state_dict())
    tokens = torch.randint(11, (2, 400))
    error = (single(tokens).double() - double(tokens)).abs()
    # All but the few positions after a score so near 0 that rounding decides its sign. (The norms' epsilon depends on
    # the dtype, which costs 1e-5.)
    assert error.flatten().quantile(0.97) < 2e-4


@torch.no_grad()
def test_dropout_acts_on_embedding_and_mlp_too() -> None:
    model = small(dropout=0.5)
    x = torch.randn(1, 5, 32, dtype=torch.float64)
    for module in (model.dropout, model.blocks[0].mlp):
        assert torch.equal(module(x), module(x))
        module.train()
        assert not torch.equal(module(x), module(x))


@torch.no_grad()
def test_attention_weights_of_every_layer() -> None:
    model = small(dropout=0.5).train()
    weights = model.attention_weights(torch.randint(11, (2, 9)))
    assert [tuple(layer.shape) for layer in weights] == [(2, 4, 9, 9)] * 2
    total = weights[0].sum(-1)
    assert ((total - 1).abs() < 1e-9).logical_or(total == 0).all()
    assert model.training
    assert model.blocks[0].attention.training


@torch.no_grad()
def test_attention_weights_under_masks_are_those_of_the_forward_pass() -> None:
    model = small("rope")
    tokens = torch.randint(11, (2, 9))
    key_mask = torch.arange(9).expand(2, 9) >= torch.tensor([[0], [3]])
    weights = model.attention_weights(tokens, key_mask=key_mask)
    normed = model.blocks[0].attention_norm(model.embedding(tokens))
    assert torch.equal(weights[0], model.blocks[0].attention.weights(normed, Context(key_mask=key_mask)))
    assert (weights[1][1, ..., :3] == 0).all()
    segment_ids = torch.tensor([[0] * 4 + [1] * 5] * 2)
    apart = model.attention_weights(tokens, segment_ids=segment_ids)
    assert (apart[1][..., 4:, :4] == 0).all()


@torch.no_grad()
def test_hidden_from_embedded_tokens_and_what_each_block_reads() -> None:
    model = small("tra")
    tokens = torch.randint(11, (2, 9))
    streams: list[torch.Tensor] = []
    hidden = model.hidden_from(model.embedding(tokens), streams=streams)
    assert torch.equal(hidden, model.hidden(tokens))
    assert torch.equal(streams[0], model.embedding(tokens))
    assert torch.equal(streams[1], model.blocks[0](streams[0], Context()))
    assert len(streams) == 2


def test_the_first_blocks_alone() -> None:
    model = Decoder(sized("mini", attention="fot")).eval()
    shallow = Decoder(replace(model.config, layers=2)).eval()
    shallow.load_state_dict({name: x for name, x in model.state_dict().items() if name in shallow.state_dict()})
    tokens, cache = torch.randint(6, (2, 9)), model.new_cache()[:2]
    with torch.no_grad():
        found = [model.hidden_from(model.embedded(piece), cache=cache, layers=2) for piece in tokens.split(5, dim=1)]
        torch.testing.assert_close(torch.cat(found, dim=1), shallow.hidden(tokens))
    with pytest.raises(ValueError, match="cache must be a list of 4, one Cache for each layer, got 2"):
        model(tokens, cache=cache)


@pytest.mark.parametrize("attention", sorted(MECHANISMS))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_checkpointed_blocks_give_the_same_gradients_with_dropout(attention: str, dtype: torch.dtype) -> None:
    model = small(attention, dtype, dropout=0.3).train()
    tokens = torch.randint(11, (2, 21))
    gradients = []
    for model.checkpoint_blocks in (False, True):
        torch.manual_seed(7)
        model.zero_grad()
        model(tokens).square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for plain, again in zip(*gradients, strict=True):
        assert torch.equal(plain, again)


def test_checkpointed_blocks_run_again_in_training_only() -> None:
    model, tokens, calls = small().train(), torch.randint(11, (2, 9)), []
    model.blocks[1].register_forward_pre_hook(lambda *_: calls.append(1))
    model.checkpoint_blocks = True
    model(tokens).sum().backward()
    assert len(calls) == 2
    calls.clear()
    with torch.no_grad():
        model(tokens)
    model.eval()(tokens).sum().backward()
    assert len(calls) == 2


def test_checkpointed_blocks_keep_fewer_tensors() -> None:
    model, tokens = small().train(), torch.randint(11, (2, 50))
    kept = []
    for model.checkpoint_blocks in (False, True):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, sizes=sizes: sizes.append(x.numel()) or x, lambda x: x):
            model(tokens)
        kept.append(sum(sizes))
    assert kept[1] < kept[0] / 3


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"attention": "ropee"}, "attention must be one of .*, got 'ropee'; did you mean 'rope'?"),
        ({"layers": 0}, "layers must be at least 1, got 0"),
        ({"layers": 300_000}, "layers must be at most 10,000, got 300,000"),
        ({"width": 10**30}, "width must be at most 1,048,576, got 1,0"),
        ({"vocabulary": 2**32 + 1}, "vocabulary must be at most 4,294,967,296, got 4,294,967,297"),
        ({"layers": "4"}, "layers must be a whole number, got '4'"),
        ({"heads": True}, "heads must be a whole number, got True"),
        ({"vocabulary": 0}, "vocabulary must be at least 1, got 0"),
        ({"kv_heads": 1.0}, "kv_heads must be a whole number or None, got 1.0"),
        ({"dropout": None}, "dropout must be a finite number, got None"),
        ({"residual": "post"}, "residual must be 'normalised' or 'pre_norm', got 'post'"),
        (
            {"attention_options": {"treshold": 1.0}},
            "attention_options of tra must be among .* you mean 'threshold'",
        ),
        ({"attention_options": {"threshold": "1"}}, "threshold in attention_options of tra must be a finite number"),
        ({"attention_options": None}, "attention_options must be a dict of options, got None"),
        # What the mechanism itself finds.
        ({"width": 255}, r"width must be a multiple of heads \(4\), got 255"),
        ({"kv_heads": 3}, r"kv_heads must divide heads \(4\), got 3"),
        ({"dropout": 1.0}, r"dropout must be a probability in \[0, 1\), got 1.0"),
        ({"attention": "rope", "width": 12}, "width // heads must be a multiple of 2 for RoPE, got 3"),
        ({"attention": "differential", "width": 24}, "width // heads must be a multiple of 4 for RoPE, got 6"),
        ({"attention": "sinusoidal", "width": 9, "heads": 3}, "width must be even for sinusoidal positions, got 9"),
        ({"attention": "cope", "attention_options": {"positions": 0}}, "positions must be at least 1, got 0"),
        ({"attention_options": {"impl": "gpu"}}, "impl must be one of .*, got 'gpu'"),
    ],
)
def test_wrong_config_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sized("mini", **changes)


def test_options_reach_every_layer() -> None:
    model = small("cope", attention_options={"positions": 5, "qk_norm": False})
    for block in model.blocks:
        assert block.attention.embedding.shape == (8, 5)
        assert not block.attention.qk_norm


def test_lambda_of_differential_attention_starts_by_depth() -> None:
    starts = [block.attention.lambda_start for block in small("differential").blocks]
    assert starts == pytest.approx([0.2, 0.8 - 0.6 * math.exp(-0.3)])
    told = small("differential", attention_options={"lambda_start": 0.8})
    assert [block.attention.lambda_start for block in told.blocks] == [0.8, 0.8]


@pytest.mark.parametrize(
    "attention, options, label",
    [
        ("rope", {}, "rope"),
        ("rope", {"theta": 10_000}, "rope theta=10000"),
        ("rope", {"factor": 4, "scaling": "ntk", "theta": 1e6}, "rope theta=1e+06 scaling=ntk factor=4"),
        ("stick-breaking", {"qk_norm": False}, "stick-breaking qk_norm=False"),
        ("tra", {"gate_bias": None, "threshold": 0.0}, "tra gate_bias=None threshold=0"),
        ("differential", {"lambda_start": 0.85}, "differential lambda_start=0.85"),
    ],
)
def test_label_names_mechanism_and_given_options(attention: str, options: dict[str, Any], label: str) -> None:
    assert sized("mini", attention=attention, attention_options=options).label == label


def test_configs_are_hashable_and_comparable_and_keep_their_own_options() -> None:
    options = {"theta": 10_000}
    config = sized("mini", attention="rope", attention_options=options)
    same = sized("mini", attention="rope", attention_options={"theta": 10_000.0})
    other = sized("mini", attention="rope")
    assert config == same != other
    assert hash(config) == hash(same)
    assert len({config, same, other}) == 2
    options["theta"] = 5
    assert config.attention_options == {"theta": 10_000}
    assert sized("mini").attention_options is not sized("mini").attention_options


def test_a_config_survives_json() -> None:
    options = {"scaling": "yarn", "factor": 2, "trained_length": 64, "qk_norm": False}
    config = DecoderConfig(9, 2, 4, 32, 2, "selective", options, 0.2, "pre_norm")
    assert DecoderConfig.from_dict(json.loads(json.dumps(asdict(config)))) == config
    plain = DecoderConfig(9, attention="differential")
    assert DecoderConfig.from_dict(asdict(plain)) == plain


@pytest.mark.parametrize(
    "attention, qk_norm, options",
    [
        ("tra", True, {}),
        ("fot", False, {"qk_norm": False}),
        ("differential", True, {"lambda_start": 0.8}),
        ("differential", False, {"qk_norm": False, "lambda_start": 0.8}),
    ],
)
def test_a_config_of_version_0_1_keeps_its_meaning(attention: str, qk_norm: bool, options: dict[str, Any]) -> None:
    written = {
        "vocabulary": 60,
        "layers": 2,
        "heads": 4,
        "width": 32,
        "kv_heads": None,
        "attention": attention,
        "qk_norm": qk_norm,
        "dropout": 0.01,
        "residual": "normalised",
    }
    before = dict(written)
    config = DecoderConfig.from_dict(written)
    assert written == before
    assert config == DecoderConfig(60, 2, 4, 32, attention=attention, attention_options=options)


@pytest.mark.parametrize(
    "stored, message",
    [
        (
            {"vocabulary": 6, "attention_options": {}, "dropuot": 0.1},
            "what is stored of a DecoderConfig must be among vocabulary, layers, .*, got 'dropuot'; "
            "did you mean 'dropout'",
        ),
        ({"vocabulary": 6, "attention_options": {}, "qk_norm": True}, "got 'qk_norm'"),
        ({"vocabulary": 6, "qk_norm": "yes"}, "qk_norm in attention_options of tra must be True or False, got 'yes'"),
        ({"layers": 2}, "vocabulary must be in what is stored of a DecoderConfig"),
        ({"vocabulary": 6, "attention": "rope", "attention_options": {"thta": 1}}, "did you mean 'theta'"),
    ],
)
def test_what_is_wrong_in_a_stored_config_is_named(stored: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DecoderConfig.from_dict(stored)


WITHOUT_COMPILER = """
import os, sys, torch, tra
torch.set_num_threads(1)

def use(name):
    model = tra.Decoder(tra.DecoderConfig(9, layers=1, heads=2, width=16, attention=name))
    model(torch.zeros(2, 5, dtype=torch.long)).sum().backward()
    with torch.inference_mode():
        model(torch.zeros(2, 5, dtype=torch.long), cache=model.new_cache())

def loaded():
    return [name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules]

for name in tra.MECHANISMS:
    use(name)
child = os.fork()
if child == 0:
    use("tra")
    os._exit(len(loaded()))
print(loaded(), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_neither_a_config_nor_a_call_loads_the_compiler() -> None:
    """Which takes seconds, in a forked process as in a fresh one."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_COMPILER], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] 0"


@pytest.mark.parametrize(
    "tokens, message",
    [
        (torch.zeros(2, 5), r"tokens must be an int32 or int64 tensor \[B, L\], got torch.float32"),
        (torch.zeros(2, 5).bool(), r"tokens must be an int32 or int64 tensor \[B, L\], got torch.bool"),
        ([[1, 2]], r"tokens must be an int32 or int64 tensor \[B, L\], got list"),
        (torch.zeros(5).long(), r"tokens must have the shape \[B, L\], got \[5\]"),
        (torch.tensor([[1, 11]]), "tokens must be at least 0 and less than the vocabulary of 11, got 11"),
        (torch.tensor([[10, -1]]).int(), "tokens must be at least 0 and less than the vocabulary of 11, got -1"),
    ],
)
def test_tokens_of_the_wrong_kind_are_named(tokens: Any, message: str) -> None:
    model = small()
    for call in (model, model.hidden, model.attention_weights):
        with pytest.raises(ValueError, match=message):
            call(tokens)
    with pytest.raises(ValueError, match=r"embedded must have the shape \[B, L, 32\], got \[2, 5\]"):
        model.hidden_from(torch.zeros(2, 5))


@torch.no_grad()
def test_a_wrong_mask_or_cache_is_named_before_anything_is_stored() -> None:
    model, tokens = small(), torch.randint(11, (2, 9))
    cache = model.new_cache()
    model(tokens, cache=cache)
    with pytest.raises(ValueError, match=r"key_mask must have the shape \[B, Lk\] = \[2, 10\], got \[2, 1\]"):
        model(tokens[:, :1], cache=cache, key_mask=torch.ones(2, 1, dtype=torch.bool))
    with pytest.raises(ValueError, match="cache must be a list of 2, one Cache for each layer, got 1"):
        model(tokens[:, :1], cache=cache[:1])
    with pytest.raises(ValueError, match=r"cache must hold as many tokens in every layer, got \[9, 0\]"):
        model(tokens[:, :1], cache=[cache[0], *model.new_cache()[:1]])
    with pytest.raises(ValueError, match="cache must be a list of 2, one Cache for each layer, got Cache"):
        model(tokens[:, :1], cache=cache[0])
    assert [len(layer) for layer in cache] == [9, 9]


@torch.no_grad()
def test_gates_of_a_block_are_those_that_its_mechanism_reads() -> None:
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    block = small().blocks[0]
    assert_close(block.gates(x), block.attention.log_gate(block.attention_norm(x)).exp())
    assert small("rope").blocks[0].gates(x) is None


def test_misspelt_size_gets_a_suggestion() -> None:
    with pytest.raises(ValueError, match="size must be one of medium, mini, got 'minni'; did you mean 'mini'"):
        sized("minni")


class LargestTensor(TorchDispatchMode):
    """How many elements the largest result of any operation has, forward or backward."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            self.elements = max(self.elements, x.numel() if isinstance(x, Tensor) else 0)
        return out


def loss_and_gradients(model: Decoder, tokens: Tensor, targets: Tensor) -> tuple[list[Tensor], int]:
    model.zero_grad()
    with LargestTensor() as largest:
        loss = model(tokens, targets=targets)
        loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())], largest.elements


@pytest.mark.parametrize("every", [True, False])
def test_the_loss_of_a_long_text_never_has_its_logits_together(monkeypatch: pytest.MonkeyPatch, every: bool) -> None:
    model = Decoder(DecoderConfig(vocabulary=997, layers=1, heads=2, width=16, dropout=0.0))
    tokens, targets = torch.randint(997, (2, 3, 111)).unbind(0)
    if not every:
        targets = targets.masked_fill(torch.rand(3, 111) < 0.3, -100)
    logits = model(tokens)
    dense = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    expected = [dense.detach(), *torch.autograd.grad(dense, list(model.parameters()))]
    whole, elements = loss_and_gradients(model, tokens, targets)
    assert elements >= int((targets != -100).sum()) * 997
    monkeypatch.setattr(tra.model, "LOGITS_AT_ONCE", 997 * 50)
    monkeypatch.setattr(tra.model, "LOGITS_PER_PIECE", 997 * 30)
    pieces, elements = loss_and_gradients(model, tokens, targets)
    assert elements <= 997 * 30
    for name, results in (("whole", whole), ("pieces", pieces)):
        for actual, right in zip(results, expected, strict=True):
            assert_close(actual, right, rtol=1e-5, atol=1e-5 * right.abs().max().item(), msg=name)
    assert not every or torch.equal(whole[0], expected[0])


@pytest.mark.parametrize(
    "targets, message",
    [
        (torch.zeros(2, 4, dtype=torch.int64), r"must have the shape \[2, 5\] of tokens, got \[2, 4\]"),
        (torch.zeros(2, 5), "must be an int32 or int64 tensor .*, got torch.float32"),
        ([[0] * 5] * 2, "must be an int32 or int64 tensor .*, got list"),
        (torch.full((2, 5), 9999), "must be -100, or at least 0 and less than the vocabulary of [0-9]+, got 9999"),
        (torch.full((2, 5), -1), "must be -100, or at least 0 and less than the vocabulary of [0-9]+, got -1"),
    ],
)
def test_targets_that_are_no_tokens_after_these_are_refused(targets: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"targets {message}"):
        small()(torch.zeros(2, 5, dtype=torch.int64), targets=targets)


def test_tokens_and_targets_may_be_int32() -> None:
    model, tokens = small(), torch.ones(2, 5, dtype=torch.int32)
    assert torch.equal(model(tokens, targets=tokens), model(tokens.long(), targets=tokens.long()))


def test_a_negative_number_of_logits_is_refused() -> None:
    with pytest.raises(ValueError, match="logits_to_keep must be at least 0, got -1"):
        small()(torch.zeros(2, 5, dtype=torch.int64), logits_to_keep=-1)
