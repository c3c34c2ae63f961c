"""Text into a pydantic model: the answer is JSON by the model's schema, whatever the language model would rather say.

    python examples/extract.py
    python examples/extract.py --model FOLDER_OR_GGUF

Needs `pip install llguidance pydantic`. The grammar holds from the first token of the answer to its last, with drafts
and without, so an answer that was not cut by `max_new_tokens` is always valid.
"""

from argparse import ArgumentParser
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from roost import LLM, Options

MAIL = "Hi, the kettle I bought last week smells of burnt plastic. I would like my money back. Greetings, Jo"


class Ticket(BaseModel):
    """What a support team wants to know of a mail."""

    summary: Annotated[str, Field(max_length=60)]
    product: Literal["kettle", "toaster", "other"]
    wants: Literal["refund", "repair", "advice"]
    urgency: Annotated[int, Field(ge=1, le=5)]


def main() -> None:
    """Read one mail."""
    parser = ArgumentParser(description="Extract a record from a text.")
    parser.add_argument("--model", default="default", help="a GGUF file, a Hugging Face folder, or 'default'")
    args = parser.parse_args()

    with LLM(args.model) as llm:
        messages = [{"role": "user", "content": f"Summarise this mail as JSON.\n\n{MAIL}"}]
        output = llm.chat(messages, Options(temperature=0, max_new_tokens=512), schema=Ticket)
        ticket = Ticket.model_validate_json(output.text)
        print(f"product: {ticket.product}, wants: {ticket.wants}, urgency: {ticket.urgency}")
        print(ticket.summary)
        print(
            f"[{output.usage.completion_tokens} tokens, {output.spec.drafts_forced} of them drafts that had no choice]"
        )


if __name__ == "__main__":
    main()
