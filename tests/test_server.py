"""The example server over loopback: uvicorn on a free port, and OpenAI's own client in front of it."""

import importlib
import shutil
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from tests.language_run import SENTENCES
from tra import Sampling
from tra.errors import RunError
from tra.hub import TraForCausalLM
from tra.hub.export import export
from tra.hub.generation import generate, load

httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")
uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

FOLDER = Path(__file__).parent.parent / "examples" / "server"
PLACES, WAITING, MOST, LONGEST, BYTES = 4, 60, 40, 900, 20_000


@pytest.fixture(scope="module")
def folder(language_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("served") / "model"
    export(language_run, made)
    return made


@pytest.fixture(scope="module")
def serve() -> Iterator[Any]:
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module("serve")
    sys.path.remove(str(FOLDER))


@contextmanager
def served(app: Any) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [free]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{free.getsockname()[1]}"
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def prefix(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A saved cache, and the text that was read for it."""
    path = tmp_path_factory.mktemp("prefixes") / "sentences.safetensors"
    generate(*load(folder), SENTENCES * 20, 1, save_cache=path)
    return path, SENTENCES * 20


@pytest.fixture(scope="module")
def url(serve: Any, folder: Path, prefix: tuple[Path, str]) -> Iterator[str]:
    limits = serve.Limits(MOST, LONGEST, BYTES)
    app = serve.make_app(folder, limits=limits, places=PLACES, waiting=WAITING, prefixes=[prefix[0]])
    with served(app) as made:
        yield made


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=60.0) as made:
        yield made


@pytest.fixture
def complete(client: Any) -> Callable[..., Any]:
    def ask(prompt: Any = "The river", **options: Any) -> Any:
        return client.completions.create(model="model", prompt=prompt, **{"max_tokens": 25, **options})

    return ask


def health(url: str) -> dict[str, Any]:
    return httpx.get(f"{url}/health", timeout=60.0).json()


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(600):
        if condition():
            return
        time.sleep(0.02)
    pytest.fail("it did not come to be within 12 s")


@pytest.fixture
def held(serve: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The first token of each request is written at once, the others when this is set."""
    go_on, step = threading.Event(), serve.Batcher._step

    def held_step(batcher: Any, group: Any) -> None:
        if go_on.is_set():
            step(batcher, group)
        else:
            time.sleep(0.002)

    monkeypatch.setattr(serve.Batcher, "_step", held_step)
    yield go_on
    go_on.set()


def expected(folder: Path, prompt: str, tokens: int, seed: int = 0, **options: Any) -> str:
    """What transformers writes with the same options and seed."""
    model, tokenizer = TraForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    torch.manual_seed(seed)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, **options)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def test_a_folder_that_asks_for_more_is_not_served_otherwise(serve: Any, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"repetition_penalty": 5.0}')
    with pytest.raises(ValueError, match=r"generation_config.json asks for more"):
        serve.make_app(tmp_path / "model")


def test_it_says_which_model_is_there(client: Any, url: str) -> None:
    assert [model.id for model in client.models.list()] == ["model"]
    assert client.models.retrieve("model").owned_by == "tra"
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("gpt-4")
    assert (error.value.code, error.value.param) == ("model_not_found", "model")
    assert {"status": "ok", "model": "model", "attention": "tra"}.items() <= health(url).items()


@pytest.mark.parametrize(
    "options, theirs",
    [
        ({"temperature": 0}, {"do_sample": False}),
        ({"seed": 0}, {"do_sample": True, "top_k": 0}),
        (
            {"temperature": 0.7, "top_p": 0.9, "seed": 3, "extra_body": {"top_k": 7}},
            {"do_sample": True, "temperature": 0.7, "top_k": 7, "top_p": 0.9},
        ),
    ],
)
def test_a_completion_is_what_transformers_writes(
    complete: Any, folder: Path, options: dict[str, Any], theirs: dict[str, Any]
) -> None:
    text = expected(folder, "The river", 25, options.get("seed", 0), **theirs)
    answer = complete(**options)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, answer.model) == (text, "length", "model")
    prompt = len(AutoTokenizer.from_pretrained(folder)("The river")["input_ids"])
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (prompt, 25, prompt + 25)
    *pieces, last = complete(
        stream=True, stream_options={"include_usage": True, "include_obfuscation": False}, **options
    )
    assert len(pieces) > 5
    assert "".join(piece.choices[0].text for piece in pieces) == text
    assert [piece.choices[0].finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert {piece.id for piece in pieces} == {last.id}
    assert (last.choices, last.usage) == ([], usage)


def test_text_is_sent_while_it_is_written(complete: Any, held: threading.Event) -> None:
    """The model waits for the client to have read the first piece."""
    with complete(stream=True, seed=1) as answer:
        assert next(answer).choices[0].text
        held.set()
        assert len(list(answer)) > 4


def test_several_prompts_and_several_texts_of_each(complete: Any, folder: Path) -> None:
    ids = AutoTokenizer.from_pretrained(folder)("In 1847")["input_ids"]
    answer = complete(["The river", "In 1847"], n=2, seed=5, echo=True)
    alone = [complete(prompt, seed=seed) for prompt in ("The river", ids) for seed in (5, 6)]
    texts = [
        before + one.choices[0].text for before, one in zip(["The river"] * 2 + ["In 1847"] * 2, alone, strict=True)
    ]
    assert [choice.text for choice in answer.choices] == texts
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.prompt_tokens == alone[0].usage.prompt_tokens + len(ids)
    assert answer.usage.completion_tokens == 100


def test_a_text_ends_before_what_stops_it(complete: Any) -> None:
    text = complete(temperature=0).choices[0].text
    stop = text[8:12]
    cut = text[: text.index(stop)]
    answer = complete(temperature=0, stop=["never written", stop])
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (cut, "stop")
    pieces = [piece.choices[0] for piece in complete(temperature=0, stop=stop, stream=True)]
    assert "".join(piece.text for piece in pieces) == cut
    assert pieces[-1].finish_reason == "stop"


def test_a_stop_that_is_long_does_not_hold_up_others(serve: Any) -> None:
    """With each token of a text the loop that serves all clients compares it with what ends the text."""

    class ThreeLetters:
        def add(self, token: int) -> str:
            return "abc"

    choice, began = serve.Choice(0, None, ThreeLetters(), ["abd" * 300_000, "bca"]), time.process_time()
    assert [choice.add(0) for _ in range(2)] == ["a", ""]
    assert (choice.held, choice.finish) == ("", "stop")
    assert time.process_time() - began < 1.0  # with every beginning of the stop it takes minutes


def test_a_prompt_goes_on_from_a_saved_cache(complete: Any, folder: Path, prefix: tuple[Path, str]) -> None:
    answer = complete(f"{prefix[1]}In 1847 the", temperature=0)
    details = answer.usage.prompt_tokens_details
    assert answer.usage.prompt_tokens - 12 < details.cached_tokens < answer.usage.prompt_tokens
    assert answer.choices[0].text == expected(folder, f"{prefix[1]}In 1847 the", 25, do_sample=False)
    assert complete("In 1847").usage.prompt_tokens_details.cached_tokens == 0


def test_a_saved_cache_of_another_model_is_refused(
    serve: Any, folder: Path, prefix: tuple[Path, str], tmp_path: Path
) -> None:
    model, tokenizer = load(folder)
    with torch.no_grad():
        model.get_input_embeddings().weight += 1
    model.save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    with pytest.raises(RunError, match="is the cache of another weights"):
        serve.make_app(tmp_path / "other", prefixes=[prefix[0]])


def test_fifty_clients_at_once_are_batched_and_do_not_disturb_each_other(complete: Any, url: str) -> None:
    """Prompts of different lengths, which join and leave while others are written."""
    requests = [
        {"prompt": SENTENCES[: 5 + number] * (1 + number % 3), "seed": number, "max_tokens": 5 + number % 15}
        for number in range(50)
    ]

    def ask(request: dict[str, Any]) -> str:
        return complete(**request).choices[0].text

    alone = [ask(request) for request in requests]
    assert len(set(alone)) > 40
    with ThreadPoolExecutor(50) as pool:
        assert list(pool.map(ask, requests)) == alone
    found = health(url)
    assert found["largest_batch"] == PLACES
    assert (found["running"], found["waiting"]) == (0, 0)


def test_beyond_those_who_may_wait_it_sends_away(complete: Any, held: threading.Event, url: str) -> None:
    with ThreadPoolExecutor(PLACES + WAITING) as pool:
        answers = [pool.submit(complete, max_tokens=2) for _ in range(PLACES + WAITING)]
        wait_until(lambda: (health(url)["running"], health(url)["waiting"]) == (PLACES, WAITING))
        with pytest.raises(openai.RateLimitError, match=f"{WAITING} requests are waiting; try again") as error:
            complete()
        assert error.value.response.headers["retry-after"] == "1"
        held.set()
        assert all(answer.result().choices[0].finish_reason in ("length", "stop") for answer in answers)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_place(
    complete: Any, client: Any, held: threading.Event, url: str, stream: bool
) -> None:
    if stream:
        opened = [complete(max_tokens=MOST, stream=True, seed=1) for _ in range(PLACES)]
        for answer in opened:
            next(answer)
            answer.close()  # without reading what comes
    else:
        with ThreadPoolExecutor(PLACES) as pool:
            asked = [pool.submit(complete, max_tokens=MOST, timeout=1.0) for _ in range(PLACES)]
            assert all(isinstance(answer.exception(), openai.APITimeoutError) for answer in asked)
    held.set()
    wait_until(lambda: health(url)["running"] == 0)
    assert complete().choices[0].finish_reason in ("length", "stop")


def test_a_client_that_leaves_while_it_waits_is_never_served(complete: Any, held: threading.Event, url: str) -> None:
    with ThreadPoolExecutor(PLACES) as pool:
        first = [pool.submit(complete, max_tokens=2) for _ in range(PLACES)]
        wait_until(lambda: health(url)["running"] == PLACES)
        with pytest.raises(openai.APITimeoutError):
            complete(max_tokens=MOST, timeout=0.5)
        held.set()
        assert all(answer.result() for answer in first)
    wait_until(lambda: (health(url)["running"], health(url)["waiting"]) == (0, 0))


@pytest.mark.parametrize(
    "request_, param, message",
    [
        ({"prompt": ""}, "prompt", "prompt: must be a text, a list of tokens, or a list of those"),
        ({"prompt": []}, "prompt", "none of them empty"),
        ({"stop": list("abcde")}, "stop", "stop: must be a text or a list of at most 4"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": MOST + 1}, "max_tokens", f"max_tokens must be at most {MOST}, got {MOST + 1}"),
        ({"prompt": SENTENCES * 60}, "prompt", f"prompt must have at most {LONGEST} tokens, got "),
        ({"prompt": [1, 300]}, "prompt", "prompt must hold tokens of less than 300, got 300"),
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"temperature": 1e-9}, "temperature", "temperature must be 0 or at least 1e-06, got 1e-09"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"seed": -1}, "seed", "greater than or equal to 0"),
        ({"n": 17}, "n", "less than or equal to 16"),
        ({"prompt": ["The"] * 9, "n": 2}, "n", "n must be at most 16 over all prompts, got 18"),
        ({"logprobs": 5}, "logprobs", "logprobs is not supported by this server"),
        ({"extra_body": {"temprature": 1}}, "temprature", "Extra inputs are not permitted"),
    ],
)
def test_a_wrong_request_is_named(complete: Any, request_: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        complete(**request_)
    assert error.value.param == param
    assert message in error.value.body["message"]


@pytest.mark.parametrize(
    "body, message",
    [
        (r'{"model": "model", "prompt": "The", "temperature": NaN}', "temperature"),
        (r'{"model": "model", "prompt": "The", "max_tokens": 1e400}', "max_tokens"),
        (r'{"model": "model", "prompt": "\ud800"}', "Invalid JSON"),
        ('{"prompt": ', "Invalid JSON"),
        ("[]", "should be"),
    ],
)
def test_a_wrong_request_that_cannot_be_repeated_is_named_too(url: str, body: str, message: str) -> None:
    answer = httpx.post(f"{url}/v1/completions", content=body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_what_is_not_there_is_an_error_in_the_same_form(url: str) -> None:
    for path, status in (("/v1/chat/completions", 404), ("/v1/completions", 405)):
        answer = httpx.get(f"{url}{path}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, None)


def test_transformers_own_server_knows_its_own_classes_only(folder: Path) -> None:
    """Why there is this server: the day that this fails, `transformers serve` may do."""
    serving = pytest.importorskip("transformers.cli.serving.model_manager")
    with pytest.raises(AttributeError, match="transformers has no attribute TraForCausalLM"):
        serving.ModelManager(device="cpu", trust_remote_code=True).load_model_and_processor(f"{folder}@main")


def test_a_long_body_is_refused_before_it_is_read(complete: Any, url: str) -> None:
    with pytest.raises(openai.APIStatusError, match=f"a request must have at most {BYTES} bytes") as error:
        complete("x" * BYTES)
    assert error.value.status_code == 413
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as raw:  # which says a gigabyte and sends nothing
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\n")
        assert raw.recv(100).startswith(b"HTTP/1.1 413 ")

    def endless() -> Iterator[bytes]:
        for _ in range(1_000_000):
            sent.append(None)
            yield b"x" * 4096

    sent: list[None] = []
    with suppress(httpx.TransportError):  # the server may have closed the connection while more was sent
        assert httpx.post(f"{url}/v1/completions", content=endless()).status_code == 413
    assert len(sent) < 50_000  # what lies in buffers between the two


def test_a_client_that_leaves_while_it_sends_is_no_failure(
    complete: Any, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as raw:
        raw.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{"model": "mod')
    assert complete(max_tokens=1).choices
    assert [record.getMessage() for record in caplog.records if record.name.startswith("uvicorn")] == []


def test_a_key_is_asked_for_where_there_is_one(serve: Any, folder: Path) -> None:
    with served(serve.make_app(folder, api_key="secret")) as url:
        for key, right in (("secret", True), ("wrong", False)):
            with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
                if right:
                    assert client.completions.create(model="model", prompt="The").choices
                else:
                    with pytest.raises(openai.AuthenticationError):
                        client.completions.create(model="model", prompt="The")


@pytest.mark.parametrize("stream", [True, False])
def test_a_failure_on_the_way_is_told(complete: Any, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, choose = [], Sampling.choose

    def broken(*arguments: Any) -> Any:
        steps.append(None)
        if len(steps) % 4 == 0:
            raise RunError("the weights are damaged")
        return choose(*arguments)

    monkeypatch.setattr(Sampling, "choose", broken)
    for _ in range(PLACES + 1):  # each frees its place
        with pytest.raises(openai.APIError, match="the weights are damaged"):
            list(complete(stream=stream))


def test_a_request_that_finds_no_room_is_told_and_the_next_is_served(
    serve: Any, complete: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, calls = serve.Batcher._place, []

    def first_fails(batcher: Any, request: Any) -> Any:
        calls.append(None)
        if len(calls) == 1:
            raise RunError("no memory is left")
        return place(batcher, request)

    monkeypatch.setattr(serve.Batcher, "_place", first_fails)
    with pytest.raises(openai.APIError, match="no memory is left"):
        complete(max_tokens=1)
    assert complete(max_tokens=1).choices[0].finish_reason in ("length", "stop")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_batcher_that_fails_tells_everybody_and_takes_nobody_more(
    serve: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(batcher: Any) -> bool:
        with batcher.changed:
            batcher.changed.wait_for(lambda: batcher.waiting)
        raise RunError("the device is lost")

    monkeypatch.setattr(serve.Batcher, "_admit", broken)
    with (
        served(serve.make_app(folder, places=1, waiting=1)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=60.0) as client,
    ):
        with pytest.raises(openai.APIError, match="the device is lost"):
            client.completions.create(model="model", prompt="The")
        assert httpx.get(f"{url}/health").status_code == 503
        with pytest.raises(openai.RateLimitError, match="the server is closing"):
            client.completions.create(model="model", prompt="The")


def test_a_short_prompt_does_not_wait_for_a_long_one(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are read in turns, a piece each."""
    read: list[str] = []
    batcher = serve.Batcher.__new__(serve.Batcher)
    batcher.reading, batcher.groups = deque(["long", "short"]), []
    rounds = iter([True, True, True, False])
    monkeypatch.setattr(serve.Batcher, "_admit", lambda self: next(rounds))
    monkeypatch.setattr(serve.Batcher, "_read", lambda self, row: read.append(row))
    monkeypatch.setattr(serve.Batcher, "_rows", lambda self: [])
    batcher.waiting, batcher.changed = deque(), threading.Condition()
    batcher.run()
    assert read == ["long", "short", "long"]


def test_a_long_prompt_does_not_wait_for_ever_new_short_ones(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round ends one short prompt and brings another."""
    read: list[str] = []
    batcher = serve.Batcher.__new__(serve.Batcher)
    batcher.reading, batcher.groups = deque(["short 0", "long"]), []
    rounds = iter(range(1, 7))

    def admit(self: Any) -> bool:
        number = next(rounds)
        self.reading.append(f"short {number}")
        return number < 6

    def read_one(self: Any, row: str) -> None:
        read.append(row)
        if row != "long":
            self.reading.remove(row)

    monkeypatch.setattr(serve.Batcher, "_admit", admit)
    monkeypatch.setattr(serve.Batcher, "_read", read_one)
    monkeypatch.setattr(serve.Batcher, "_rows", lambda self: [])
    batcher.waiting, batcher.changed = deque(), threading.Condition()
    batcher.run()
    assert read == ["short 0", "long", "short 1", "short 2", "long"]


def test_more_texts_than_there_can_be_are_refused_for_good(serve: Any, folder: Path) -> None:
    with (
        served(serve.make_app(folder, places=2, waiting=1)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=60.0) as client,
    ):
        with pytest.raises(openai.BadRequestError, match="n must be at most 3 over all prompts, got 4"):
            client.completions.create(model="model", prompt="The", n=4)
        assert len(client.completions.create(model="model", prompt="The", n=3, max_tokens=2).choices) == 3


def test_a_mechanism_that_knows_positions_is_served_without_batches(serve: Any, tmp_path: Path) -> None:
    """Its caches cannot be moved within a sequence, so each request is written by itself, with the same places."""
    from tests.language_run import text_recipe, write_text
    from tra.runs import train

    run = train(text_recipe(write_text(tmp_path / "text"), "rope"), tmp_path / "run").folder
    model, tokenizer = load(run)
    with served(serve.make_app(run, places=3)) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="any") as client:

        def ask(prompt: str) -> str:
            asked = client.completions.create(model="run", prompt=prompt, temperature=0, max_tokens=20)
            return asked.choices[0].text

        prompts = ["The river", "In 1847 the river", SENTENCES]
        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(ask, prompts))
        assert found == [generate(model, tokenizer, prompt, 20)["text"] for prompt in prompts]
        assert health(url)["largest_batch"] == 1
