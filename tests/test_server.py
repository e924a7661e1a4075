"""The example server over real HTTP: uvicorn on a free port, httpx in front of it."""

import importlib.util
import json
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from tests.language_run import SENTENCES
from tra import Sampling
from tra.errors import RunError
from tra.hub import TraForCausalLM
from tra.hub.export import export

httpx = pytest.importorskip("httpx")
uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("fastapi")

FILE = Path(__file__).parent.parent / "examples" / "server" / "serve.py"
AT_ONCE, MOST, LONGEST = 3, 40, 300


@pytest.fixture(scope="module")
def folder(language_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("served") / "model"
    export(language_run, made)
    return made


@pytest.fixture(scope="module")
def serve() -> Any:
    spec = importlib.util.spec_from_file_location("serve", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def client(serve: Any, folder: Path) -> Iterator[Any]:
    app = serve.make_app(folder, most_tokens=MOST, longest=LONGEST, at_once=AT_ONCE)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [free]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        with httpx.Client(base_url=f"http://127.0.0.1:{free.getsockname()[1]}", timeout=60.0) as made:
            yield made
        server.should_exit = True
        thread.join()


def test_a_folder_that_asks_for_more_is_not_served_otherwise(serve: Any, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"repetition_penalty": 5.0}')
    with pytest.raises(ValueError, match=r"generation_config.json asks for more"):
        serve.make_app(tmp_path / "model")


def events_of(lines: Iterator[str]) -> list[tuple[str, dict[str, Any]]]:
    words = [line.split(": ", 1) for line in lines if line]
    assert [name for name, _ in words] == ["event", "data"] * (len(words) // 2)
    return [(kind, json.loads(data)) for (_, kind), (_, data) in zip(words[::2], words[1::2], strict=True)]


def streamed(client: Any, **request: Any) -> list[tuple[str, dict[str, Any]]]:
    with client.stream("POST", "/generate", json=request) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        return events_of(answer.iter_lines())


def expected(folder: Path, prompt: str, tokens: int, seed: int, **options: Any) -> str:
    """What transformers writes with the same options and seed."""
    model, tokenizer = TraForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    torch.manual_seed(seed)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, **options)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def test_it_says_that_it_is_there(client: Any, folder: Path) -> None:
    assert client.get("/health").json() == {"status": "ok", "model": folder.name, "attention": "tra"}


@pytest.mark.parametrize(
    "options, theirs",
    [
        ({"temperature": 0}, {"do_sample": False}),
        ({}, {"do_sample": True, "top_k": 0}),
        (
            {"temperature": 0.7, "top_k": 7, "top_p": 0.9, "seed": 3},
            {"do_sample": True, "temperature": 0.7, "top_k": 7, "top_p": 0.9},
        ),
    ],
)
def test_what_is_streamed_is_what_transformers_writes(
    client: Any, folder: Path, options: dict[str, Any], theirs: dict[str, Any]
) -> None:
    text = expected(folder, "The river", 25, options.get("seed", 0), **theirs)
    *pieces, (kind, done) = streamed(client, prompt="The river", tokens=25, **options)
    assert kind == "done"
    assert {kind for kind, _ in pieces} == {"message"}
    assert len(pieces) > 5
    assert "".join(piece["text"] for _, piece in pieces) == done["text"] == text
    whole = client.post("/generate", json={"prompt": "The river", "tokens": 25, "stream": False, **options})
    assert whole.json() == done
    assert done["new_tokens"] == 25


def test_text_is_sent_while_it_is_written(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model waits for the client to have read the first piece."""
    go_on, steps, choose = threading.Event(), [], Sampling.choose

    def held(*arguments: Any) -> Any:
        steps.append(None)
        assert len(steps) < 10 or go_on.wait(30)
        return choose(*arguments)

    monkeypatch.setattr(Sampling, "choose", held)
    with client.stream("POST", "/generate", json={"prompt": "The river", "tokens": 20}) as answer:
        lines = answer.iter_lines()
        assert next(lines) == "event: message"
        assert len(steps) <= 10
        go_on.set()
        assert len(list(lines)) > 4


def test_many_at_once_do_not_disturb_each_other(client: Any) -> None:
    requests = [{"prompt": prompt, "tokens": 30, "seed": seed} for prompt in ("The", "In 1847") for seed in range(6)]

    def ask(request: dict[str, Any]) -> str:
        return streamed(client, **request)[-1][1]["text"]

    alone = [ask(request) for request in requests]
    assert len(set(alone)) > 6
    with ThreadPoolExecutor(AT_ONCE) as pool:
        assert list(pool.map(ask, requests)) == alone


def test_beyond_its_places_it_sends_away_and_a_client_that_leaves_frees_its_place(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, begun, choose = threading.Event(), [], Sampling.choose

    def held(sampling: Sampling, scores: Tensor, generator: torch.Generator) -> Tensor:
        """The first token of each request, and the others when they are let."""
        assert all(generator is not other for other in begun) or go_on.wait(30)
        begun.append(generator)
        return choose(sampling, scores, generator)

    monkeypatch.setattr(Sampling, "choose", held)
    request = {"prompt": "The river", "tokens": MOST}
    opened = [client.stream("POST", "/generate", json=request) for _ in range(AT_ONCE)]
    for answer in opened:
        answer.__enter__()
    refused = client.post("/generate", json=request)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert refused.json()["detail"] == f"{AT_ONCE} requests are being served; try again"
    assert client.get("/health").status_code == 200
    for answer in opened:
        answer.__exit__(None, None, None)  # without reading what comes
    go_on.set()
    for _ in range(200):
        answer = client.post("/generate", json={**request, "stream": False})
        if answer.status_code == 200:
            return
        time.sleep(0.05)
    pytest.fail("the places were not freed")


@pytest.mark.parametrize(
    "request_, message",
    [
        ({"prompt": ""}, "at least 1 character"),
        ({}, "Field required"),
        ({"prompt": "The", "tokens": 0}, "greater than or equal to 1"),
        ({"prompt": "The", "tokens": MOST + 1}, f"tokens must be at most {MOST}, got {MOST + 1}"),
        ({"prompt": SENTENCES * 200}, f"prompt must have at most {LONGEST} tokens, got "),
        ({"prompt": "The", "temperature": -1}, "greater than or equal to 0"),
        ({"prompt": "The", "temperature": 1e-9}, "temperature must be 0 or at least 1e-06, got 1e-09"),
        ({"prompt": "The", "top_p": 0}, "greater than 0"),
        ({"prompt": "The", "seed": -1}, "greater than or equal to 0"),
        ({"prompt": "The", "temprature": 1}, "Extra inputs are not permitted"),
    ],
)
def test_a_wrong_request_is_named(client: Any, request_: dict[str, Any], message: str) -> None:
    answer = client.post("/generate", json=request_)
    assert answer.status_code == 422
    assert message in json.dumps(answer.json())


@pytest.mark.parametrize(
    "body, name",
    [
        (r'{"prompt": "The", "temperature": NaN}', "temperature"),
        (r'{"prompt": "The", "tokens": 1e400}', "tokens"),
        (r'{"prompt": "\ud800"}', "prompt"),
    ],
)
def test_a_wrong_request_that_cannot_be_repeated_is_named_too(client: Any, body: str, name: str) -> None:
    answer = client.post("/generate", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 422
    assert f'["body", "{name}"]' in answer.text


@pytest.mark.parametrize("stream", [True, False])
def test_a_failure_on_the_way_is_told(client: Any, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, choose = [], Sampling.choose

    def broken(*arguments: Any) -> Any:
        steps.append(None)
        if len(steps) % 4 == 0:
            raise RunError("the weights are damaged")
        return choose(*arguments)

    monkeypatch.setattr(Sampling, "choose", broken)
    request = {"prompt": "The river", "stream": stream}
    for _ in range(AT_ONCE + 1):  # each frees its place
        if stream:
            *_, last = streamed(client, **request)
            assert last == ("error", {"message": "the weights are damaged"})
        else:
            answer = client.post("/generate", json=request)
            assert (answer.status_code, answer.json()) == (500, {"detail": "the weights are damaged"})
