"""`tra bench`; what it measures is tested with `tra.bench`."""

from pathlib import Path

import pytest

from tests.cli.calling import Captured, fails, json_of, shows
from tra.bench import BenchRequest
from tra.bench.cases import Case


def test_options_are_passed_on_and_what_was_measured_printed(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[BenchRequest] = []

    def measure(request: BenchRequest, more: list[Case]) -> dict[str, object]:
        generation = ["64 new tokens of a small model, tra", "64 new tokens of a small model, rope"]
        assert [case.what for case in more] == ([] if request.run else generation)
        asked.append(request)
        return {"rows": [{"ratio": 0.5}]}

    monkeypatch.setattr("tra.bench.run_benchmarks", measure)
    words = ["bench", "--only", "decode one", "--seconds", "0.25", "--output", str(tmp_path)]
    assert json_of(words, capsys) == {"rows": [{"ratio": 0.5}]}
    assert shows(words, capsys) == f"{tmp_path}\n"
    command = f"tra bench --only 'decode one' --seconds 0.25 --output {tmp_path}"
    assert asked[1] == BenchRequest(folder=tmp_path, seconds=0.25, only="decode one", command=command)
    json_of(["bench", "--run", "runs/mine", "--lengths", "64", "128"], capsys)
    assert (asked[-1].run, asked[-1].lengths, asked[-1].folder.parent) == (Path("runs/mine"), (64, 128), Path("runs"))


def test_a_wrong_argument_is_one_line(capsys: Captured) -> None:
    assert fails(["bench", "--seconds", "0"], capsys) == "seconds must be positive, got 0.0"
    assert fails(["bench", "--seconds", "x"], capsys) == "--seconds must be a finite number, got 'x'"
    assert fails(["bench", "--lengths", "64"], capsys) == "lengths must be given with a run, got (64,) and none"
