"""One question, answered piece by piece: the shortest program that uses the library.

    python examples/chat.py "Why is the sky blue?"
    python examples/chat.py --model FOLDER_OR_GGUF "Why is the sky blue?"

The default model (93 MB) is fetched on first use.
"""

from argparse import ArgumentParser

from roost import LLM, Options


def main() -> None:
    """Ask once and print the answer as it comes."""
    parser = ArgumentParser(description="Ask a model one question.")
    parser.add_argument("question", nargs="?", default="What is the capital of France?")
    parser.add_argument("--model", default="default", help="a GGUF file, a Hugging Face folder, or 'default'")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    args = parser.parse_args()

    options = Options(temperature=0, max_new_tokens=args.max_new_tokens)
    with LLM(args.model) as llm:
        for piece in llm.stream_chat([{"role": "user", "content": args.question}], options):
            print(piece.text, end="", flush=True)
            if piece.finished is not None:
                usage = piece.finished.usage
                print(f"\n[{usage.completion_tokens} tokens, ended by {piece.finished.reason}]")


if __name__ == "__main__":
    main()
