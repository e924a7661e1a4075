"""`Decoder.generate`, held against transformers' `generate` token for token."""

import math
from collections.abc import Callable
from typing import Any

import accelerate
import pytest
import torch
from torch import Tensor, nn

from tests.hub.models import VOCABULARY, build, every_mechanism, left_padded, prompt
from tests.hub.models import generate as theirs
from tra import Decoder, Sampling, ThresholdRelativeAttention, sized
from tra.attention import Context
from tra.errors import RunError
from tra.generation import stream_tokens
from tra.hub import to_decoder
from tra.model import MLP, Block

two_mechanisms = pytest.mark.parametrize("attention", ["tra", "rope"])


@every_mechanism
def test_greedy_tokens_are_those_of_transformers(attention: str) -> None:
    model, tokens = build(attention), prompt()
    expected = theirs(model, tokens, max_new_tokens=24)
    assert len(expected[:, 7:].unique()) > 3
    assert torch.equal(to_decoder(model).generate(tokens, 24), expected)


@every_mechanism
def test_left_padded_rows_are_those_of_transformers(attention: str) -> None:
    model = build(attention)
    tokens, mask = left_padded([torch.randint(VOCABULARY, (length,)) for length in (1, 11, 8)])
    found = to_decoder(model).generate(tokens, 16, key_mask=mask.bool())
    assert torch.equal(found, theirs(model, tokens, attention_mask=mask))


@two_mechanisms
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7},
        {"top_k": 4},
        {"top_k": 1000},
        {"top_p": 0.6},
        {"top_p": 1e-6},
        {"temperature": 1.9, "top_k": 9, "top_p": 0.8},
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", [0, 1])
def test_sampled_tokens_are_those_of_transformers_with_the_same_seed(
    attention: str, options: dict[str, Any], seed: int
) -> None:
    model, tokens = build(attention), prompt(batch=3)
    with torch.no_grad():
        model.lm_head.weight *= 0.2  # no token is certain
    torch.manual_seed(seed)
    expected = theirs(model, tokens, do_sample=True, **{"temperature": 1.0, "top_k": 0, "top_p": 1.0, **options})
    decoder, sampling = to_decoder(model), Sampling(**{"temperature": 1.0, **options})
    own = torch.Generator().manual_seed(seed)
    assert torch.equal(decoder.generate(tokens, 16, sampling, generator=own), expected)
    torch.manual_seed(seed)
    assert torch.equal(decoder.generate(tokens, 16, sampling), expected)


@two_mechanisms
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("pad", [None, 3])
def test_rows_end_and_are_padded_as_those_of_transformers(attention: str, temperature: float, pad: int | None) -> None:
    model, tokens = build(attention), prompt(batch=5)
    decoder, sampling = to_decoder(model), Sampling(temperature)
    free = decoder.generate(tokens, 20, sampling, generator=torch.Generator().manual_seed(0))
    ends = [free[0, 10].item(), free[1, 13].item()]
    torch.manual_seed(0)
    expected = theirs(
        model,
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=20,
        do_sample=temperature > 0,
        top_k=0,
        eos_token_id=ends,
        pad_token_id=pad,
    )
    found = decoder.generate(tokens, 20, sampling, end=ends, pad=pad, generator=torch.Generator().manual_seed(0))
    assert torch.equal(found, expected)
    filler = ends[0] if pad is None else pad
    first = (found[0, 7:] == ends[0]).nonzero()[0].item()
    assert (found[0, 8 + first :] == filler).all()


def test_generation_stops_when_every_row_has_ended() -> None:
    decoder, tokens = to_decoder(build()), prompt(batch=1)
    free = decoder.generate(tokens, 20)
    steps = list(stream_tokens(decoder.reader(), tokens, 20, Sampling(), end=[free[0, 11].item()]))
    assert len(steps) == free[0, 7:].tolist().index(free[0, 11].item()) + 1


@every_mechanism
@pytest.mark.parametrize("residual", ["normalised", "pre_norm"])
@torch.inference_mode()
def test_a_new_token_is_scored_as_by_the_whole_model_to_the_bit(attention: str, residual: str) -> None:
    decoder = to_decoder(build(attention, residual=residual))
    tokens, mask = left_padded([torch.randint(VOCABULARY, (length,)) for length in (9, 4)])
    for key_mask in (None, mask.bool()):
        read, cache, start = decoder.reader(), decoder.new_cache(), 0
        for stop in (5, 6, 7, 9):
            seen, new = (None, None) if key_mask is None else (key_mask[:, :stop], key_mask[:, start:stop])
            hidden = decoder.hidden(tokens[:, start:stop], cache=cache, key_mask=seen)
            assert torch.equal(read(tokens[:, start:stop], new), decoder.head(hidden[:, -1:])[:, 0])
            start = stop


def test_a_second_turn_remembers_the_padding_of_the_first() -> None:
    decoder = to_decoder(build())
    rows = [torch.randint(VOCABULARY, (length,)) for length in (9, 4)]
    tokens, mask = left_padded(rows)
    read, said = decoder.reader(), torch.randint(VOCABULARY, (2, 3))
    first = torch.stack(list(stream_tokens(read, tokens, 5, key_mask=mask.bool())), dim=1)
    heard = torch.cat([first[:, -1:], said], dim=1)  # the last token was chosen, not read
    second = torch.stack(list(stream_tokens(read, heard, 5)), dim=1)
    for row, alone in enumerate(rows):
        whole = torch.cat([alone, first[row], said[row]])[None]
        assert decoder.generate(whole, 5)[0, -5:].tolist() == second[row].tolist()


def test_tokens_keep_their_kind() -> None:
    decoder, tokens = to_decoder(build()), prompt()
    made = decoder.generate(tokens.int(), 3, end=[VOCABULARY - 1])
    assert made.dtype == torch.int32
    assert torch.equal(made, decoder.generate(tokens, 3, end=[VOCABULARY - 1]).int())


def changed(x: Tensor) -> Tensor:
    """Something that no norm undoes."""
    return x + x.roll(1, dims=-1)


class Louder(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 1.5 * super().forward(x)


class Mixed(Block):
    def forward(self, *arguments: Any) -> Tensor:
        return changed(super().forward(*arguments))


class Turned(ThresholdRelativeAttention):
    def project(self, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = super().project(*arguments)
        return query.flip(-1), key, value


class Graded(ThresholdRelativeAttention):
    def normalised(self, x: Tensor) -> Tensor:
        return super().normalised(x) * torch.linspace(0.5, 1.0, x.shape[1])[:, None, None]


class Added(accelerate.hooks.ModelHook):
    def post_forward(self, module: nn.Module, output: Tensor) -> Tensor:
        return output + 1.0


class Other(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return changed(x)


class Wrapped(nn.Module):
    """A block inside a plain module, which has none of its attributes."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return changed(self.inner(x, context))


class OtherEmbedding(Decoder):
    def embedded(self, tokens: Tensor) -> Tensor:
        return super().embedded(tokens).flip(-1)


class OtherHidden(Decoder):
    def hidden(self, *arguments: Any, **options: Any) -> Tensor:
        return super().hidden(*arguments, **options).flip(-1)


class OtherBlocks(Decoder):
    def hidden_from(self, *arguments: Any, **options: Any) -> Tensor:
        return super().hidden_from(*arguments, **options).flip(-1)


def hooked(name: str) -> Callable[[Decoder], object]:
    return lambda decoder: decoder.get_submodule(name).register_forward_hook(lambda _module, _given, out: out + 1.0)


def becomes(name: str, kind: type[nn.Module]) -> Callable[[Decoder], object]:
    return lambda decoder: setattr(decoder.get_submodule(name), "__class__", kind)


def louder(decoder: Decoder) -> None:
    own = decoder.blocks[1].mlp.expand
    decoder.blocks[1].mlp.expand = Louder(*own.weight.shape[::-1])
    decoder.blocks[1].mlp.expand.load_state_dict(own.state_dict())


def another_project(decoder: Decoder) -> None:
    project = decoder.blocks[0].attention.project

    def turned(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = project(*arguments)
        return query.flip(-1), key, value

    decoder.blocks[0].attention.project = turned


def another_forward(decoder: Decoder) -> None:
    forward = decoder.forward
    decoder.forward = lambda *arguments, **options: forward(*arguments, **options).flip(-1)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(change, id=name)
        for name, change in {
            "another linear layer": louder,
            "a subclass of the block": becomes("blocks.0", Mixed),
            "a subclass that projects otherwise": becomes("blocks.0.attention", Turned),
            "a subclass that normalises otherwise": becomes("blocks.0.attention", Graded),
            "a replaced project": another_project,
            "a hook of accelerate": lambda decoder: accelerate.hooks.add_hook_to_module(
                decoder.blocks[1].attention.value, Added()
            ),
            **{
                f"a hook on {name or 'the decoder'}": hooked(name)
                for name in (
                    *("", "embedding", "dropout", "blocks.0", "blocks.0.attention", "blocks.1.attention.query"),
                    *("blocks.1.mlp", "blocks.0.mlp.dropout", "norm", "head"),
                )
            },
            "a replaced dropout": lambda decoder: setattr(decoder, "dropout", Other()),
            "a replaced dropout of the MLP": lambda decoder: setattr(decoder.blocks[1].mlp, "dropout", Other()),
            "a subclass that embeds otherwise": becomes("", OtherEmbedding),
            "a subclass with another hidden": becomes("", OtherHidden),
            "a subclass with another hidden_from": becomes("", OtherBlocks),
            "a replaced forward": another_forward,
            "a wrapped block": lambda decoder: decoder.blocks.__setitem__(0, Wrapped(decoder.blocks[0])),
        }.items()
    ],
)
@torch.inference_mode()
def test_generation_computes_what_the_model_computes_whoever_has_a_part_in_it(
    change: Callable[[Decoder], object],
) -> None:
    decoder, tokens = to_decoder(build()), prompt()
    plain = decoder(tokens)[:, -1]
    change(decoder)
    read = decoder.reader()
    for stop, part in zip((5, 6, 7), tokens.split((5, 1, 1), dim=1), strict=True):
        scores = read(part, None)
        torch.testing.assert_close(scores, decoder(tokens[:, :stop])[:, -1], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(plain, scores, atol=1e-3)


@pytest.mark.parametrize("owner", [MLP, Block, ThresholdRelativeAttention, Decoder, nn.Dropout])
@torch.inference_mode()
def test_generation_computes_what_a_patched_class_computes(
    owner: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, tokens, forward = to_decoder(build()), prompt(), owner.forward
    plain = decoder(tokens)[:, -1]
    monkeypatch.setattr(owner, "forward", lambda *given, **options: changed(forward(*given, **options)))
    read = decoder.reader()
    read(tokens[:, :6], None)
    scores = read(tokens[:, 6:], None)
    torch.testing.assert_close(scores, decoder(tokens)[:, -1], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(plain, scores, atol=1e-3)


def test_a_hook_that_bans_a_token_bans_it_from_what_is_generated() -> None:
    decoder, tokens = to_decoder(build()), prompt(batch=1)
    banned = decoder.generate(tokens, 1)[0, -1].item()

    def ban(_module: nn.Module, _given: Any, scores: Tensor) -> Tensor:
        return scores.index_fill(-1, torch.tensor([banned]), -1e9)

    decoder.register_forward_hook(ban)
    assert banned not in decoder.generate(tokens, 20)[0, 7:]


def test_dropout_that_is_left_on_acts_on_every_token() -> None:
    """Monte-Carlo dropout: the model is in evaluation mode, its dropout is not."""
    decoder, tokens = Decoder(sized("mini", vocabulary=200, dropout=0.5)).eval(), torch.tensor([[1]])
    for module in decoder.modules():
        if isinstance(module, nn.Dropout):
            module.train()
    read = decoder.reader()
    with torch.inference_mode():
        read(torch.tensor([[1, 2]]), None)
    assert len({tuple(decoder.generate(tokens, 8)[0, 2:].tolist()) for _ in range(8)}) > 4


def test_what_is_generated_belongs_to_the_caller() -> None:
    """Neither gradients nor inference mode reach beyond the loop, which may be left at any step."""
    decoder = Decoder(sized("mini")).eval()
    steps = stream_tokens(decoder.reader(), torch.tensor([[1, 2]]), 5, Sampling())
    next(steps)
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    steps.close()
    made = decoder.generate(torch.tensor([[1, 2]]), 3)
    assert not made.is_inference()
    decoder(made).sum().backward()


def test_in_training_mode_dropout_stays() -> None:
    decoder, tokens = Decoder(sized("mini", dropout=0.5)), torch.tensor([[1, 2]])
    assert len({tuple(decoder.generate(tokens, 20)[0].tolist()) for _ in range(4)}) > 1
    assert len({tuple(decoder.eval().generate(tokens, 20)[0].tolist()) for _ in range(4)}) == 1


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"temperature": -1.0}, "temperature must be 0 or at least 1e-06, got -1.0"),
        ({"temperature": math.nan}, "temperature must be 0 or at least 1e-06, got nan"),
        ({"top_k": -1}, "top_k must be a whole number of at least 0, got -1"),
        ({"temperature": "a"}, "temperature must be 0 or at least 1e-06, got 'a'"),
        ({"temperature": True}, "temperature must be 0 or at least 1e-06, got True"),
        ({"top_k": 2.5}, "top_k must be a whole number of at least 0, got 2.5"),
        ({"top_k": True}, "top_k must be a whole number of at least 0, got True"),
        ({"top_p": None}, r"top_p must be in \(0, 1\], got None"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_p": 1.1}, r"top_p must be in \(0, 1\], got 1.1"),
    ],
)
def test_a_wrong_way_to_choose_is_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**wrong)


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"tokens": [[1]]}, r"tokens must be an int32 or int64 tensor \[B, L\], got list"),
        ({"tokens": torch.ones(1, 2)}, r"tokens must be an int32 or int64 tensor \[B, L\], got torch.float32"),
        ({"tokens": torch.ones(2, 0, dtype=torch.long)}, r"with at least one token, got \[2, 0\]"),
        ({"tokens": torch.tensor([[6]])}, "tokens must be at least 0 and less than the vocabulary of 6, got 6"),
        ({"new": 0}, "new must be a whole number of at least 1, got 0"),
        ({"sampling": 0.8}, "sampling must be a Sampling, got 0.8"),
        ({"end": 2}, r"end must be a collection of whole numbers, as \[2\], got 2"),
        ({"end": [2.5]}, r"end must be a collection of whole numbers, as \[2\], got \[2.5\]"),
        ({"end": "2"}, "end must be a collection of whole numbers"),
        ({"end": [True]}, r"end must be a collection of whole numbers, as \[2\], got \[True\]"),
        ({"end": [-1, 2]}, "end must hold tokens of at least 0 and less than the vocabulary of 6, got -1"),
        ({"end": [2, 6]}, "end must hold tokens of at least 0 and less than the vocabulary of 6, got 6"),
        ({"end": [2], "pad": True}, "pad must be a token, a whole number of at least 0, got True"),
        ({"new": True}, "new must be a whole number of at least 1, got True"),
        ({"end": [2], "pad": -1}, "pad must be a token, a whole number of at least 0, got -1"),
        ({"end": [2], "pad": 6}, "pad must be less than the vocabulary of 6, got 6"),
        ({"key_mask": torch.ones(1, 3)}, r"key_mask must have the shape \[B, Lk\] = \[1, 2\], got \[1, 3\]"),
        ({"key_mask": torch.tensor([[True, False]])}, "padding belongs on the left"),
    ],
)
def test_a_wrong_argument_is_named(changed: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"tokens": torch.tensor([[1, 2]]), "new": 3, **changed}
    with pytest.raises(ValueError, match=message):
        Decoder(sized("mini")).eval().generate(**arguments)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_scores_that_are_not_finite_are_an_error(bad: float, temperature: float) -> None:
    decoder = Decoder(sized("mini")).eval()
    with torch.no_grad():
        decoder.norm.weight[0] = bad
    with pytest.raises(RunError, match="the model's scores for token 3 are not finite: its weights are damaged"):
        decoder.generate(torch.tensor([[1, 2]]), 3, Sampling(temperature))


@pytest.mark.parametrize("sampling", [Sampling(1e-6), Sampling(1e-6, top_k=2), Sampling(1e-6, top_p=0.5)], ids=str)
def test_scores_that_a_low_temperature_makes_too_large_still_choose_the_most_probable(sampling: Sampling) -> None:
    scores = torch.tensor([[1e33, 3e33, -2e33], [-1e33, -3e33, -2e33]])
    assert sampling.choose(scores).tolist() == [1, 0]
