"""`tra bench`; what it measures is tested with `tra.bench`."""

from pathlib import Path

import pytest

from tests.cli.calling import Captured, fails, json_of, shows


def test_options_are_passed_on_and_what_was_measured_printed(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[object] = []

    def measure(*arguments: object) -> dict[str, object]:
        *others, more, variant = arguments
        assert [case.what for case in more] == [
            "64 new tokens of a small model, tra",
            "64 new tokens of a small model, rope",
        ]
        given.append((*others, variant))
        return {"rows": [{"ratio": 0.5}]}

    monkeypatch.setattr("tra.bench.run_benchmarks", measure)
    arguments = ["bench", "--only", "decode one", "--seconds", "0.25", "--output", str(tmp_path)]
    assert json_of(arguments, capsys) == {"rows": [{"ratio": 0.5}]}
    assert shows(arguments, capsys) == f"{tmp_path}\n"
    assert given == [(tmp_path, 0.25, "decode one", None, (), None)] * 2
    json_of(["bench", "--run", "runs/mine", "--lengths", "64", "128", "--output", str(tmp_path)], capsys)
    assert given[-1] == (tmp_path, 5.0, "", Path("runs/mine"), (64, 128), None)


def test_a_wrong_argument_is_one_line(capsys: Captured) -> None:
    assert fails(["bench", "--seconds", "0"], capsys) == "seconds must be positive, got 0.0"
    assert fails(["bench", "--seconds", "x"], capsys) == "--seconds must be a number, got 'x'"
    assert fails(["bench", "--lengths", "64"], capsys) == "lengths must be given with a run, got (64,) and none"
