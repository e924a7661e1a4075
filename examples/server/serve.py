"""A model behind OpenAI's interface for completions: `/v1/completions` and `/v1/models`, for any client of that.

python serve.py RUN-OR-EXPORTED-FOLDER --port 8000
"""

import argparse
import asyncio
import hmac
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import uvicorn
from batching import Batcher, TooManyError
from batching import Request as Asked
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from transformers import PreTrainedTokenizerBase

from tra import Sampling
from tra.hub.generation import TextStream, asks_for_more, load, prompt_ids

log = logging.getLogger(__name__)

MOST_CHOICES = 16
"""Texts that one request may ask for."""
PATIENCE = 4
"""How many times longer than allowed a request may be for its client to be heard out."""
KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
MISSING = {
    "best_of": 1,
    "frequency_penalty": 0,
    "logit_bias": {},
    "logprobs": None,
    "presence_penalty": 0,
    "suffix": "",
}
"""What OpenAI's interface has and this server has not, with what means nothing there."""

UNIONS = {
    "prompt": "must be a text, a list of tokens, or a list of those, none of them empty",
    "stop": "must be a text or a list of at most 4, none of them empty",
}
"""What is said of arguments of which pydantic says what each of several types would want."""

Text = Annotated[str, Field(min_length=1)]
Tokens = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False
    include_obfuscation: bool = False
    """Pieces are as they are, whatever it says."""


class Completion(BaseModel):
    """What a client may ask for, as OpenAI has it; `top_k` is ours. null is the same as nothing."""

    model_config = ConfigDict(extra="forbid")
    model: str
    prompt: Text | Tokens | Annotated[list[Text] | list[Tokens], Field(min_length=1, max_length=MOST_CHOICES)]
    max_tokens: int = Field(16, ge=1)
    temperature: float = Field(1.0, ge=0.0, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(0, ge=0)
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    stop: Text | Annotated[list[Text], Field(max_length=4)] = Field([], validate_default=False)
    seed: int | None = Field(None, ge=0, lt=1 << 62)
    """The same seed gives the same text, but for the rounding of products in other batches."""
    echo: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    user: str = ""

    @model_validator(mode="before")
    @classmethod
    def known(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        for name, nothing in MISSING.items():
            if given.get(name) not in (None, nothing):
                raise RefusedError(f"{name} is not supported by this server", param=name)
        return {name: value for name, value in given.items() if value is not None and name not in MISSING}


class RefusedError(Exception):
    """An answer that is an error, in OpenAI's form."""

    def __init__(self, message: str, status: int = 400, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def content(self) -> dict[str, Any]:
        kind = KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        # Within ASCII: what a client sent may be no text that UTF-8 could hold.
        headers = {429: {"Retry-After": "1"}, 413: {"Connection": "close"}}.get(self.status)
        return Response(json.dumps(self.content), self.status, headers, media_type="application/json")


@dataclass(frozen=True)
class Limits:
    """What a request may ask for."""

    most_tokens: int = 1024
    """New tokens of a text."""
    longest: int = 65_536
    """Tokens of a prompt."""
    most_bytes: int = 1 << 22
    """Of a request; what is longer is not read."""


@dataclass
class Choice:
    """One of the texts that a request asked for."""

    index: int
    asked: Asked
    text: TextStream
    stops: Sequence[str]
    tokens: int = 0
    finish: str | None = None
    held: str = ""
    """Text that may be the beginning of what ends it."""

    def add(self, told: int | str) -> str:
        """The text that a token adds, or the reason for which there are no more."""
        if isinstance(told, str):
            self.finish = told
            self.held += self.text.rest()
        else:
            self.tokens += 1
            self.held += self.text.add(told)
        ends = [at for at in (self.held.find(stop) for stop in self.stops) if at >= 0]
        if ends:
            self.finish, keep = "stop", min(ends)
            piece, self.held = self.held[:keep], ""
        else:
            keep = 0 if self.finish else self._open()
            piece, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        return piece

    def _open(self) -> int:
        """How many of the last characters may begin what ends the text."""
        sizes = (
            size
            for stop in self.stops
            for size in range(1, min(len(stop), len(self.held) + 1))  # not longer than the text: a stop may be long
            if self.held.endswith(stop[:size])
        )
        return max(sizes, default=0)


@dataclass
class Answer:
    """The texts of one request, as they are written."""

    batcher: Batcher
    model: str
    choices: list[Choice]
    told: asyncio.Queue[tuple[Choice, Any]]
    prompt_tokens: int
    echoed: list[str]
    id: str = field(default_factory=lambda: f"cmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    async def pieces(self) -> AsyncIterator[tuple[Choice, str]]:
        """Text as it comes, of any choice; the last of each has its reason to finish."""
        for choice, prompt in zip(self.choices, self.echoed, strict=False):
            yield choice, prompt
        left = len(self.choices)
        while left:
            choice, told = await self.told.get()
            if choice.finish is not None:
                continue  # what was written before the batcher knew
            if isinstance(told, Exception):
                raise told
            piece = choice.add(told)
            if choice.finish is not None:
                choice.asked.gone = True
                left -= 1
            if piece or choice.finish is not None:
                yield choice, piece

    def leave(self) -> None:
        """Free the places of all choices, at the end or because the client has gone."""
        for choice in self.choices:
            choice.asked.gone = True

    def content(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        what = {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}
        return {**what, "choices": choices, **more}

    def usage(self) -> dict[str, Any]:
        written = sum(choice.tokens for choice in self.choices)
        shared = sum({tuple(choice.asked.ids): choice.asked.shared for choice in self.choices}.values())
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": written,
            "total_tokens": self.prompt_tokens + written,
            "prompt_tokens_details": {"cached_tokens": shared},
        }

    async def whole(self) -> dict[str, Any]:
        texts = [""] * len(self.choices)
        async for choice, piece in self.pieces():
            texts[choice.index] += piece
        return self.content(
            [one_choice(choice, text) for choice, text in zip(self.choices, texts, strict=True)], usage=self.usage()
        )

    async def events(self, with_usage: bool) -> AsyncIterator[str]:
        """Server-sent events, as OpenAI's clients read them."""
        usage = {"usage": None} if with_usage else {}
        try:
            async for choice, piece in self.pieces():
                yield event(self.content([one_choice(choice, piece)], **usage))
            if with_usage:
                yield event(self.content([], usage=self.usage()))
            yield "data: [DONE]\n\n"
        except Exception as error:  # the status 200 is sent already
            log.exception("a request failed")
            yield event(RefusedError(str(error), 500).content)


class Streamed(StreamingResponse):
    """An answer as it is written; Starlette ends it when the client has gone."""

    def __init__(self, answer: Answer, with_usage: bool) -> None:
        super().__init__(answer.events(with_usage), media_type="text/event-stream")
        self.answer = answer

    async def __call__(self, *arguments: Any) -> None:
        try:
            await super().__call__(*arguments)
        finally:
            self.answer.leave()


def one_choice(choice: Choice, text: str) -> dict[str, Any]:
    return {"index": choice.index, "text": text, "logprobs": None, "finish_reason": choice.finish}


def event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def make_app(
    folder: Path,
    *,
    limits: Limits = Limits(),  # noqa: B008
    places: int = 8,
    waiting: int = 64,
    prefixes: Sequence[Path] = (),
    api_key: str | None = None,
) -> Starlette:
    """The server for one model.

    Args:
        folder: a run on text, or what `tra export` wrote.
        limits: what a request may ask for.
        places: texts that are written at the same time.
        waiting: texts that may wait for a place; a request beyond that is sent away with status 429.
        prefixes: files that `tra generate --save-cache` wrote, for prompts that begin like them.
        api_key: what a client must say; nothing by default.
    """
    model, tokenizer = load(folder)
    if asks_for_more(model):
        raise ValueError(f"{folder}: generation_config.json asks for more than this server does, as penalties")
    name = folder.resolve().name
    about = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "tra"}
    batcher = Batcher(model, tokenizer, places=places, waiting=waiting, prefixes=prefixes)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        batcher.start()
        yield
        await run_in_threadpool(batcher.close)

    async def health(_: Request) -> Response:
        serving = {"running": batcher.busy, "waiting": len(batcher.waiting), "largest_batch": batcher.largest}
        status, code = ("closed", 503) if batcher.closed else ("ok", 200)
        content = {"status": status, "model": name, "attention": model.config.attention, **serving}
        return JSONResponse(content, status_code=code)

    async def models(request: Request) -> Response:
        check_key(request, api_key)
        return JSONResponse({"object": "list", "data": [about]})

    async def one_model(request: Request) -> Response:
        check_key(request, api_key)
        check_model(request.path_params["model"], name)
        return JSONResponse(about)

    async def completions(request: Request) -> Response:
        check_key(request, api_key)
        try:
            asked = Completion.model_validate_json(await bounded_body(request, limits.most_bytes))
        except ValidationError as error:
            raise refused_because(error) from error
        check_model(asked.model, name)
        answer = await begin(asked, batcher, tokenizer, limits, name)
        if asked.stream:
            return Streamed(answer, asked.stream_options.include_usage)
        whole, gone = asyncio.ensure_future(answer.whole()), asyncio.ensure_future(until_gone(request))
        try:
            await asyncio.wait({whole, gone}, return_when=asyncio.FIRST_COMPLETED)
            return JSONResponse(whole.result()) if whole.done() else Response(status_code=499)  # which nobody reads
        except Exception as error:
            log.exception("a request failed")
            raise RefusedError(str(error), 500) from error
        finally:
            whole.cancel()
            gone.cancel()
            answer.leave()

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/v1/models", models),
            Route("/v1/models/{model:path}", one_model),
            Route("/v1/completions", completions, methods=["POST"]),
        ],
        exception_handlers={RefusedError: refused, HTTPException: unknown, ClientDisconnect: left, Exception: failed},
        lifespan=lifespan,
    )


async def begin(
    asked: Completion, batcher: Batcher, tokenizer: PreTrainedTokenizerBase, limits: Limits, name: str
) -> Answer:
    """Hand a request to the batcher once it is known to be right."""
    if asked.max_tokens > limits.most_tokens:
        raise RefusedError(
            f"max_tokens must be at most {limits.most_tokens}, got {asked.max_tokens}", param="max_tokens"
        )
    try:
        sampling = Sampling(asked.temperature, asked.top_k, asked.top_p)
    except ValueError as error:
        raise RefusedError(str(error), param="temperature") from error
    prompts = [asked.prompt] if isinstance(asked.prompt, str) or isinstance(asked.prompt[0], int) else asked.prompt
    most = min(MOST_CHOICES, batcher.places + batcher.most_waiting)
    if len(prompts) * asked.n > most:
        raise RefusedError(f"n must be at most {most} over all prompts, got {len(prompts) * asked.n}", param="n")
    read = [await run_in_threadpool(tokens_of, tokenizer, prompt, limits, batcher) for prompt in prompts]
    seed = secrets.randbelow(1 << 62) if asked.seed is None else asked.seed
    stops = [asked.stop] if isinstance(asked.stop, str) else asked.stop
    loop, told = asyncio.get_running_loop(), asyncio.Queue[tuple[Choice, Any]]()

    def tell(choices: list[Choice], index: int, what: Any) -> None:
        loop.call_soon_threadsafe(told.put_nowait, (choices[index], what))

    choices: list[Choice] = []
    for ids in read:
        for number in range(asked.n):
            request = Asked(ids, asked.max_tokens, sampling, seed + number, partial(tell, choices, len(choices)))
            choices.append(Choice(len(choices), request, TextStream(tokenizer, ids[-1]), stops))
    echoed = [str(tokenizer.decode(choice.asked.ids)) for choice in choices] if asked.echo else []
    answer = Answer(batcher, name, choices, told, sum(map(len, read)), echoed)
    try:
        batcher.submit([choice.asked for choice in choices])
    except TooManyError as error:
        raise RefusedError(str(error), 429, code="rate_limit_exceeded") from error
    return answer


def tokens_of(
    tokenizer: PreTrainedTokenizerBase, prompt: str | list[int], limits: Limits, batcher: Batcher
) -> list[int]:
    try:
        ids = prompt_ids(tokenizer, prompt)[0].tolist() if isinstance(prompt, str) else prompt
    except ValueError as error:
        raise RefusedError(str(error), param="prompt") from error
    vocabulary = batcher.model.config.vocab_size
    if max(ids) >= vocabulary:
        raise RefusedError(f"prompt must hold tokens of less than {vocabulary}, got {max(ids)}", param="prompt")
    if len(ids) > limits.longest:
        raise RefusedError(
            f"prompt must have at most {limits.longest} tokens, got {len(ids)}",
            param="prompt",
            code="context_length_exceeded",
        )
    return ids


async def bounded_body(request: Request, most: int) -> bytes:
    """The body of a request; of one that is too long no more than `most` bytes are kept.

    A little too much is read and dropped, as most clients read no answer before they have sent everything. One that
    says that it is much longer is refused unread, and the connection of one that becomes so is closed.
    """
    said, read, body = int(request.headers.get("content-length", 0)), 0, bytearray()
    if said <= PATIENCE * most:
        async for chunk in request.stream():
            read += len(chunk)
            if read <= most:
                body += chunk
            elif read > PATIENCE * most:
                break
    if max(said, read) > most:
        raise RefusedError(f"a request must have at most {most} bytes", 413)
    return bytes(body)


async def until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def check_key(request: Request, expected: str | None) -> None:
    given = request.headers.get("authorization", "").removeprefix("Bearer ")
    if expected is not None and not hmac.compare_digest(given.encode(), expected.encode()):
        raise RefusedError("the API key is missing or wrong", 401, code="invalid_api_key")


def check_model(given: str, served: str) -> None:
    if given != served:
        raise RefusedError(
            f"the model {given!r} does not exist; {served!r} does", 404, param="model", code="model_not_found"
        )


def refused_because(error: ValidationError) -> RefusedError:
    """The first thing that is wrong with a request; what was given is not repeated, JSON might not hold it."""
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if not problem["loc"]:
        return RefusedError(problem["msg"])
    where = str(problem["loc"][0])
    return RefusedError(f"{where}: {UNIONS.get(where, problem['msg'])}", param=where)


def refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedError)
    return error.response()


def unknown(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return RefusedError(f"{request.method} {request.url.path}: {error.detail}", error.status_code).response()


def left(_: Request, __: Exception) -> Response:
    """The client has gone while it sent its request."""
    return Response(status_code=499)  # which nobody reads


def failed(_: Request, error: Exception) -> Response:
    return RefusedError(str(error), 500).response()


def positive(word: str) -> int:
    if (number := int(word)) < 1:
        raise ValueError
    return number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    limits = Limits()
    parser.add_argument("folder", type=Path, help="a run on text, or what tra export wrote")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--places", type=positive, default=8, help="texts that are written at the same time")
    parser.add_argument("--waiting", type=positive, default=64, help="texts that may wait for a place")
    parser.add_argument("--most-tokens", type=positive, default=limits.most_tokens, help="new tokens of a text")
    parser.add_argument("--longest", type=positive, default=limits.longest, help="tokens that a prompt may have")
    parser.add_argument("--most-bytes", type=positive, default=limits.most_bytes, help="bytes that a request may have")
    parser.add_argument(
        *("--prefix", "-p"), type=Path, action="append", default=[], help="a file of tra generate --save-cache"
    )
    parser.add_argument("--api-key", help="what clients must say; nothing by default")
    given = parser.parse_args()
    app = make_app(
        given.folder,
        limits=Limits(given.most_tokens, given.longest, given.most_bytes),
        places=given.places,
        waiting=given.waiting,
        prefixes=given.prefix,
        api_key=given.api_key,
    )
    uvicorn.run(app, host=given.host, port=given.port)


if __name__ == "__main__":
    main()
