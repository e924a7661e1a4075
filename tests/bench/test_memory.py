"""Peak memory, as a process of its own reads it."""

from pathlib import Path

import numpy
import pytest

from tra import plugins
from tra.bench import memory
from tra.bench.memory import added_megabytes, in_fresh_process, measurable, peak_of_attention, peak_of_training
from tra.errors import RunError
from tra.model import DecoderConfig
from tra.ops.threshold_relative import cpu

needs_proc = pytest.mark.skipif(not measurable(), reason="peak memory is read from Linux's /proc")


@needs_proc
def test_what_is_freed_before_the_end_counts_and_what_was_held_before_does_not() -> None:
    held = numpy.ones(30 * 2**17)

    def work() -> None:
        numpy.ones(63 * 2**17)  # 8 bytes each, and freed at once

    assert 60 < added_megabytes(work) < 75
    assert held.all()


@needs_proc
def test_peak_of_training_sees_the_activations_of_a_larger_batch() -> None:
    """512 sequences of 64 tokens through 256 hidden units: an activation of them alone is 32 MB."""
    model = DecoderConfig(vocabulary=8, layers=1, heads=1, width=64)
    small, large = (peak_of_training(model, batch, 64) for batch in (2, 512))
    assert small is not None
    assert large is not None
    assert 0 <= small < 30
    assert small + 64 < large < 1000


def test_memory_is_unknown_where_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "measurable", lambda: False)
    assert peak_of_attention(every_key=True) is None
    assert peak_of_training(DecoderConfig(vocabulary=8, layers=1, heads=1, width=8), 2, 7) is None


def test_a_process_that_fails_is_an_error_with_its_reason() -> None:
    with pytest.raises(RunError, match=r"^peak memory: RuntimeError: /proc/self/status has no VmNothing$"):
        in_fresh_process(memory._megabytes, "VmNothing")


@pytest.mark.skipif(not cpu.LIBRARIES, reason="the CPU kernel is not built")
def test_the_process_has_the_variant_of_the_kernel_that_is_measured() -> None:
    for variant in cpu.LIBRARIES:
        with cpu.using(variant):
            assert in_fresh_process(cpu.about) == cpu.about()  # type: ignore[arg-type, comparison-overlap]


@needs_proc
def test_mechanisms_of_plug_ins_are_measured_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "borrowed.py"
    file.write_text(
        "from tra.attention import MECHANISMS as BUILT_IN\n"
        "print('a plug-in that talks')\n"
        "class Borrowed(BUILT_IN['nope']):\n"
        "    pass\n"
        "MECHANISMS = {'borrowed': Borrowed}\n"
    )
    monkeypatch.setattr(plugins, "_loaded", {})
    plugins.load(str(file))
    found = peak_of_training(DecoderConfig(vocabulary=8, layers=1, heads=1, width=8, attention="borrowed"), 2, 7)
    assert found is not None
    assert 0 <= found < 30
