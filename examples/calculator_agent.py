"""An agent with a tool, in a session: each round sends only what is new, and the rest of the conversation stays cached.

    make serve                                       # in another terminal
    python examples/calculator_agent.py --url http://127.0.0.1:8000

Needs `pip install openai`. Calls are held to the tool's schema by a grammar, so arguments can be used as they are.
"""

import json
import operator
from argparse import ArgumentParser
from typing import Any

from openai import OpenAI

OPERATIONS = {"plus": operator.add, "minus": operator.sub, "times": operator.mul}
CALCULATE = {
    "name": "calculate",
    "description": "Calculates with two numbers.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "operation": {"enum": [*OPERATIONS]}, "b": {"type": "integer"}},
        "required": ["a", "operation", "b"],
        "additionalProperties": False,
    },
}


def main() -> None:
    """Ask, calculate what the model wants to know, and let it answer."""
    parser = ArgumentParser(description="A calculator agent.")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    args = parser.parse_args()
    client = OpenAI(base_url=f"{args.url}/v1", api_key="none")
    client.post("/sessions", body={"id": "calculator"}, cast_to=object)

    new: list[Any] = [{"role": "user", "content": "What is 17 plus 25?"}]
    usual: Any = {"model": "default", "temperature": 0, "extra_body": {"session_id": "calculator"}, "max_tokens": 64}
    tools: Any = [{"type": "function", "function": CALCULATE}]
    choice: Any = "required"  # a small model is told to call; others may be asked with "auto"
    while new:
        answer = client.chat.completions.create(
            messages=new, tools=tools, tool_choice=choice, parallel_tool_calls=False, **usual
        )
        message, new, choice = answer.choices[0].message, [], "auto"
        for call in message.tool_calls or []:
            asked = json.loads(call.function.arguments)
            result = OPERATIONS[asked["operation"]](asked["a"], asked["b"])
            print(f"calculate({asked['a']} {asked['operation']} {asked['b']}) = {result}")
            new.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
    print(message.content)
    client.delete("/sessions/calculator", cast_to=object)


if __name__ == "__main__":
    main()
