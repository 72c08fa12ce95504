"""P9's rival, a FastAPI application as one would write it around a Ray actor; and the engine that ours has.

python p9_rival.py RAY_ADDRESS PORT
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from ranks.toys import ToyEngine

from torpor.actors.config import RankSpec
from torpor.native import Device, Ledger

ACTOR = "p9-speaker"
NAMESPACE = "torpor"
TOKENS = 8


def make_engine(spec: RankSpec, ledger: Ledger, device: Device) -> ToyEngine:
    """For `engine.kind`: a token a step for every request, and no pause between steps worth the name."""
    return ToyEngine(spec, ledger, device, step_s=0.0005)


class Speaker:
    """The bare actor: what it says costs nothing."""

    async def pid(self) -> int:
        return os.getpid()

    async def whole(self, prompt: str, tokens: int) -> str:
        return "x" * tokens

    async def stream(self, prompt: str, tokens: int) -> AsyncIterator[str]:
        for _ in range(tokens):
            yield "x"


def _shape(text: str, end: str | None) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": end}
    head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time())}
    return head | {"model": "toy", "choices": [choice]}


def make_app(speaker: Any) -> Any:
    from fastapi import FastAPI
    from pydantic import BaseModel
    from starlette.responses import StreamingResponse

    class Body(BaseModel):
        model: str
        prompt: str
        max_tokens: int
        stream: bool = False

    app = FastAPI()

    async def events(body: Body) -> AsyncIterator[str]:
        said = speaker.stream.options(num_returns="streaming").remote(body.prompt, body.max_tokens)
        async for reference in said:
            yield f"data: {json.dumps(_shape(await reference, None))}\n\n"
        yield f"data: {json.dumps(_shape('', 'length'))}\n\ndata: [DONE]\n\n"

    # A body that is defined in here is not found by its name.
    async def complete(body: Any) -> Any:
        if body.stream:
            return StreamingResponse(events(body), media_type="text/event-stream")
        return _shape(await speaker.whole.remote(body.prompt, body.max_tokens), "length")

    complete.__annotations__ = {"body": Body}
    app.post("/v1/completions")(complete)
    return app


def main() -> None:
    import ray
    import uvicorn

    address, port = sys.argv[1], int(sys.argv[2])
    ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    uvicorn.run(make_app(ray.get_actor(ACTOR)), host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    main()
