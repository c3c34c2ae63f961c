"""A session over plain HTTP, with nothing but the standard library: open, append, generate, fork, rewind, close.

    make serve                                       # in another terminal
    python examples/http_session.py --url http://127.0.0.1:8000

docs/SESSIONS.md has every field of these requests.
"""

import json
from argparse import ArgumentParser
from typing import Any
from urllib.request import Request, urlopen


class Client:
    """A server that answers in JSON."""

    def __init__(self, url: str, key: str | None) -> None:
        self._url = url
        self._headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """One request; an error status is raised by urlopen."""
        data = None if body is None else json.dumps(body).encode()
        request = Request(f"{self._url}{path}", data=data, headers=self._headers, method=method)
        with urlopen(request) as answer:
            return json.load(answer)


def main() -> None:
    """The life of a session."""
    parser = ArgumentParser(description="Walk through a session over HTTP.")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--key", help="the server's API key, if it asks for one")
    args = parser.parse_args()
    client = Client(args.url, args.key)

    path = f"/v1/sessions/{client.ask('POST', '/v1/sessions', {'ttl_s': 600})['id']}"
    client.ask("POST", f"{path}/append", {"text": "One, two, three, four, five,"})  # prefilled now
    turn = client.ask("POST", f"{path}/generate", {"max_tokens": 8, "temperature": 0})
    print(f"{turn['text']!r}, cached {turn['usage']['prompt_tokens_details']['cached_tokens']}")

    copy = f"/v1/sessions/{client.ask('POST', f'{path}/fork', {})['id']}"
    turn = client.ask("POST", f"{copy}/generate", {"text": " and then", "max_tokens": 8, "temperature": 0})
    print(f"the fork: {turn['text']!r}")

    state = client.ask("POST", f"{path}/rewind", {"turn": 1})  # keep the first turn, the append
    print(f"rewound to {state['turns']} turn, {state['length']} tokens")
    for each in (copy, path):
        client.ask("DELETE", each)


if __name__ == "__main__":
    main()
