"""Many prompts at once: the engine runs as many side by side as it has room for.

    python examples/batch.py "The sea was" "The mountain was"
    python examples/batch.py --file prompts.txt          # one prompt a line

If a prompt fails on the way, the others are completed first: the BatchError that is raised then has their outputs.
"""

from argparse import ArgumentParser
from pathlib import Path

from roost import LLM, Options

PROMPTS = ["The sea was", "The mountain was", "The city at night was"]


def main() -> None:
    """Complete every prompt and print the results in their order."""
    parser = ArgumentParser(description="Complete a list of prompts.")
    parser.add_argument("prompts", nargs="*", default=PROMPTS)
    parser.add_argument("--file", type=Path, help="a file with one prompt a line")
    parser.add_argument("--model", default="default", help="a GGUF file, a Hugging Face folder, or 'default'")
    args = parser.parse_args()

    prompts = args.file.read_text().splitlines() if args.file else args.prompts
    options = Options(temperature=0.8, top_p=0.95, seed=1, max_new_tokens=24)  # a seed: the same texts every time
    with LLM(args.model) as llm:
        for number, output in enumerate(llm.generate_all(prompts, options, show_progress=True), 1):
            print(f"{number}. {output.text!r} ({output.choices[0].finish_reason})")


if __name__ == "__main__":
    main()
