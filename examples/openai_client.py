"""OpenAI's own client against a running server: an answer, a stream, and a turn of a session.

    make serve                                       # in another terminal
    python examples/openai_client.py --url http://127.0.0.1:8000

Needs `pip install openai`. A field that OpenAI's schema does not have goes in `extra_body`, and `client.post` reaches
endpoints that it does not have.
"""

from argparse import ArgumentParser

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam


def main() -> None:
    """Ask in three ways."""
    parser = ArgumentParser(description="Use a Roost server through OpenAI's client.")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--key", default="none", help="the server's API key, if it asks for one")
    args = parser.parse_args()

    client = OpenAI(base_url=f"{args.url}/v1", api_key=args.key)
    question: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]

    answer = client.chat.completions.create(model="default", messages=question, temperature=0, max_tokens=32)
    print(answer.choices[0].message.content)

    stream = client.chat.completions.create(model="default", messages=question, temperature=0.7, stream=True)
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()

    client.post("/sessions", body={"id": "example"}, cast_to=object)
    for text in ("My name is Ada.", "What is my name?"):  # the second turn sends its own message only
        turn = client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": text}],
            temperature=0,
            max_tokens=24,
            extra_body={"session_id": "example"},
        )
        details = turn.usage.prompt_tokens_details if turn.usage else None
        print(f"{turn.choices[0].message.content} [cached {details.cached_tokens if details else 0}]")
    client.delete("/sessions/example", cast_to=object)


if __name__ == "__main__":
    main()
