"""`tra adopt`."""

from pathlib import Path

import torch
import transformers

from tests.cli.calling import Captured, fails, shows
from tests.hub.families import build_family, tokens_of
from tra.hub import adopt


def test_the_folder_is_the_model_with_tra(tmp_path: Path, capsys: Captured) -> None:
    original = build_family("llama")
    original.save_pretrained(tmp_path / "original")
    words = ["--layers", "0", "2", "--gate-bias", "1.5", "--threshold", "head", "--drop-positions"]
    shown = shows(["adopt", str(tmp_path / "original"), str(tmp_path / "new" / "adopted"), *words], capsys)
    assert shown == f"{tmp_path / 'new' / 'adopted'}\n"
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new" / "adopted")
    expected, tokens = adopt(original, layers=[0, 2], gate_bias=1.5, threshold="head", drop_positions=True), tokens_of()
    with torch.no_grad():
        torch.testing.assert_close(found(tokens).logits, expected(tokens).logits)
    assert found.config.tra == expected.config.tra


def test_a_wrong_argument_is_one_line_and_writes_nothing(tmp_path: Path, capsys: Captured) -> None:
    build_family("llama").save_pretrained(tmp_path / "original")
    model, folder = str(tmp_path / "original"), str(tmp_path / "adopted")
    assert fails(["adopt", model], capsys) == "FOLDER must be given; see tra adopt --help"
    assert fails(["adopt", model, model], capsys) == f"folder must not exist yet, got {model}"
    assert "layers must hold layers from 0 to 2, got 7" in fails(["adopt", model, folder, "--layers", "7"], capsys)
    assert fails(["adopt", str(tmp_path / "nothing"), folder], capsys).startswith("model must be a folder or a name")
    assert [path.name for path in tmp_path.iterdir()] == ["original"]
