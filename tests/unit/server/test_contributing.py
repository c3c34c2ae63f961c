"""The endpoint that CONTRIBUTING.md adds as an example really answers, and refuses like every other."""

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx
from starlette.routing import Route

from roost.server.app import make_app
from roost.server.config import ServerConfig
from roost.server.state import ServerState
from tests.support.silent_engine import SilentEngine

PAGE = Path(__file__).parents[3] / "CONTRIBUTING.md"


def test_the_endpoint_of_the_guide_answers_and_refuses() -> None:
    section = PAGE.read_text().partition("## Adding an endpoint")[2].partition("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    module: dict[str, Any] = {"__name__": "fits"}
    exec(compile(code, PAGE.name, "exec"), module)

    async def ask() -> list[httpx.Response]:
        engine = SilentEngine()
        server = ServerState(ServerConfig(), engine)
        server.open()
        app = make_app(server)
        app.router.routes.append(Route("/fits", module["fits"], methods=["POST"]))
        bodies: tuple[dict[str, Any], ...] = ({"prompt": "ab"}, {"promt": "ab"}, {"prompt": 1})
        try:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as http:
                return [await http.post("/fits", json=body) for body in bodies]
        finally:
            await engine.stop()

    good, unknown, wrong = asyncio.run(ask())
    told = good.json()
    assert good.status_code == 200 and told["prompt_tokens"] >= 1 and told["room"] == 64 - told["prompt_tokens"]
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "promt")
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "prompt")
