"""Log-probabilities: how likely each token of an output was, what else might have come, and how likely a text is.

    python examples/logprobs.py "The capital of France is"

They are the model's own, before temperature, penalties or any other option.
"""

from argparse import ArgumentParser
from math import exp

from roost import LLM, Options

ALTERNATIVES = 3


def main() -> None:
    """Score the prompt, then each token of what follows it."""
    parser = ArgumentParser(description="Print the log-probabilities of a prompt and its continuation.")
    parser.add_argument("prompt", nargs="?", default="The capital of France is")
    parser.add_argument("--model", default="default", help="a GGUF file, a Hugging Face folder, or 'default'")
    args = parser.parse_args()

    options = Options(temperature=0, max_new_tokens=8, logprobs=ALTERNATIVES, prompt_logprobs_from=0)
    with LLM(args.model) as llm:
        output = llm.generate(args.prompt, options)
        choice = output.choices[0]

        scored = len(output.prompt_logprobs)  # every prompt token but the first, which nothing comes before
        mean = sum(score.logprob for score in output.prompt_logprobs) / max(1, scored)
        print(f"prompt: {scored} tokens scored, perplexity {exp(-mean):.1f}")

        piece = llm.language.tokenizer.piece  # the bytes of a token: a character may have several tokens
        for token, score in zip(choice.tokens, choice.logprobs, strict=True):
            others = ", ".join(f"{piece(other)!r} {exp(logprob):.0%}" for other, logprob in score.top_logprobs)
            print(f"{piece(token)!r:>16} {score.logprob:8.3f}   best: {others}")


if __name__ == "__main__":
    main()
