"""What an installed wheel must do where there is torch and nothing else: `python -I tests/installed.py`.

`make wheel` runs it in a clean environment, and cibuildwheel on every platform that a release is built for.
"""

import importlib.metadata
import platform
import sys
from pathlib import Path

import torch

DISTRIBUTION = "threshold-relative-attention"
ROOT = Path(__file__).parent.parent


def results(impl: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Output and gradients. Scores of small integers are exact, so that all agree on which keys are kept."""
    from tra import threshold_relative_attention

    rng = torch.Generator().manual_seed(0)
    query, key = (torch.randint(-2, 3, (2, 4, 111, 24), generator=rng).to(dtype) for _ in range(2))
    value = torch.randn(2, 4, 111, 24, generator=rng).to(dtype)
    log_gate = -torch.rand(2, 4, 111, generator=rng).to(dtype)
    inputs = [x.requires_grad_() for x in (query, key, value, log_gate)]
    out = threshold_relative_attention(*inputs, impl=impl)
    out.square().sum().backward()
    return [out.detach(), *(x.grad for x in inputs if x.grad is not None)]


def check() -> str:
    import tra
    from tra.ops.threshold_relative import cpu

    assert Path(tra.__file__).parent != ROOT / "tra", "the sources were imported, not what is installed"
    distribution = importlib.metadata.distribution(DISTRIBUTION)
    wheel = (distribution.read_text("WHEEL") or "").splitlines()
    tags = [line.removeprefix("Tag: ") for line in wheel if line.startswith("Tag: ")]
    assert tags, "no tags"
    assert all(tag.startswith("py3-none-") for tag in tags), tags
    # Every build is optional, so that one which failed would not be missed otherwise. Windows has none.
    variants = cpu.VARIANTS if platform.machine() == "x86_64" else cpu.VARIANTS[:1]
    variants = () if sys.platform == "win32" else variants
    built = {file.stem for file in distribution.files or () if file.suffix == ".so"}
    assert built == {f"_kernel_{variant}" for variant in variants}, built
    impl = "cpu" if built else "reference"
    found, expected = results(impl, torch.float32), results("reference", torch.float64)
    assert len(found) == len(expected) == 5
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other.float(), rtol=1e-5, atol=1e-5)
    python = ".".join(map(str, sys.version_info[:3]))
    return f"{', '.join(tags)}: Python {python}, torch {torch.__version__}, {cpu.about()}"


if __name__ == "__main__":
    print(check())
