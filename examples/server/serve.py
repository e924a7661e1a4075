"""An HTTP server that streams what a model writes: one file to read, copy and change.

python serve.py RUN-OR-EXPORTED-FOLDER --port 8000
"""

import argparse
import json
import threading
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from tra import Sampling
from tra.hub.generation import asks_for_more, load, prompt_ids, written

LONGEST_PROMPT = 1 << 20
"""Characters, before anything is tokenized."""


class Request(BaseModel):
    """What a client may ask for; anything else is refused with status 422 and a message that names it."""

    model_config = ConfigDict(extra="forbid")
    prompt: str = Field(min_length=1, max_length=LONGEST_PROMPT)
    tokens: int | None = Field(None, ge=1)
    """New tokens at most; 100, or what the server allows."""
    temperature: float = Field(1.0, ge=0.0, allow_inf_nan=False)
    """0 takes the most probable token every time."""
    top_k: int = Field(0, ge=0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    seed: int = Field(0, ge=0, lt=1 << 63)
    """The same seed gives the same text, whoever else is served."""
    stream: bool = True


def make_app(folder: Path, *, most_tokens: int = 1024, longest: int = 65_536, at_once: int = 4) -> FastAPI:
    """The server for one model.

    Args:
        folder: a run on text, or what `tra export` wrote.
        most_tokens: new tokens that a request may ask for.
        longest: tokens that a prompt may have.
        at_once: requests that are served at the same time; one more is sent away with status 503.
    """
    model, tokenizer = load(folder)
    if asks_for_more(model):
        raise ValueError(f"{folder}: generation_config.json asks for more than this server does, as penalties")
    app = FastAPI(title="threshold-relative-attention")
    places = threading.BoundedSemaphore(at_once)

    @app.exception_handler(RequestValidationError)
    def wrong(_: Any, error: RequestValidationError) -> Response:
        """FastAPI's own answer repeats what was given, which JSON or UTF-8 may not be able to hold."""
        detail = [{name: problem[name] for name in ("type", "loc", "msg")} for problem in error.errors()]
        return Response(json.dumps({"detail": detail}), 422, media_type="application/json")

    @app.get("/health")
    def health() -> dict[str, Any]:
        return {"status": "ok", "model": folder.name, "attention": model.config.attention}

    @app.post("/generate", response_model=None)
    def generate(request: Request) -> StreamingResponse | dict[str, Any]:
        try:
            sampling = Sampling(request.temperature, request.top_k, request.top_p)
            ids = prompt_ids(tokenizer, request.prompt)
        except ValueError as error:
            raise HTTPException(422, str(error)) from error
        tokens = min(100, most_tokens) if request.tokens is None else request.tokens
        if tokens > most_tokens:
            raise HTTPException(422, f"tokens must be at most {most_tokens}, got {tokens}")
        if ids.shape[1] > longest:
            raise HTTPException(422, f"prompt must have at most {longest} tokens, got {ids.shape[1]}")
        if not places.acquire(blocking=False):
            raise HTTPException(503, f"{at_once} requests are being served; try again", {"Retry-After": "1"})

        def pieces() -> Iterator[tuple[int | None, str]]:
            try:
                yield from written(model, tokenizer, ids, tokens, sampling, request.seed)
            finally:  # also when the client has gone: the server drops what it no longer sends
                places.release()

        try:
            rest = pieces()
            first = next(rest)  # begun here, so that its end is sure to be reached
            if request.stream:
                return StreamingResponse(events(chain([first], rest), ids.shape[1]), media_type="text/event-stream")
            return summary([first, *rest], ids.shape[1])
        except Exception as error:
            raise HTTPException(500, str(error)) from error

    return app


def summary(written: list[tuple[int | None, str]], prompt_tokens: int) -> dict[str, Any]:
    new_tokens = sum(token is not None for token, _ in written)
    text = "".join(piece for _, piece in written)
    return {"text": text, "prompt_tokens": prompt_tokens, "new_tokens": new_tokens}


def events(pieces: Iterator[tuple[int | None, str]], prompt_tokens: int) -> Iterator[str]:
    """Server-sent events: {"text": ...} for each piece of text, then all of it as "done", or an "error"."""
    so_far = []
    try:
        for token, piece in pieces:
            so_far.append((token, piece))
            if piece:
                yield event({"text": piece})
        yield event(summary(so_far, prompt_tokens), "done")
    except Exception as error:  # the status 200 is sent already
        yield event({"message": str(error)}, "error")


def event(content: dict[str, Any], kind: str = "message") -> str:
    return f"event: {kind}\ndata: {json.dumps(content)}\n\n"


def positive(word: str) -> int:
    if (number := int(word)) < 1:
        raise ValueError
    return number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a run on text, or what tra export wrote")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--most-tokens", type=positive, default=1024, help="new tokens that a request may ask for")
    parser.add_argument("--longest", type=positive, default=65_536, help="tokens that a prompt may have")
    parser.add_argument("--at-once", type=positive, default=4, help="requests that are served at the same time")
    given = parser.parse_args()
    app = make_app(given.folder, most_tokens=given.most_tokens, longest=given.longest, at_once=given.at_once)
    uvicorn.run(app, host=given.host, port=given.port)


if __name__ == "__main__":
    main()
