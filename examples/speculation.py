"""What speculation does for a request: rounds, drafts, accept length; and that the text is the same without it.

    python examples/speculation.py
    python examples/speculation.py --model FOLDER --draft HEAD_FOLDER

Without a draft head, `auto` looks n-grams up in the text so far. The default model comes with a head.
"""

from argparse import ArgumentParser

from roost import LLM, EngineConfig, Options, SpecConfig

OPTIONS = Options(temperature=0, max_new_tokens=48)
PROMPT = "Red, green, blue. Red, green, blue. Red, green,"


def main() -> None:
    """Compare speculation with plain decoding."""
    parser = ArgumentParser(description="Print what speculation did for one request.")
    parser.add_argument("--model", default="default", help="a GGUF file, a Hugging Face folder, or 'default'")
    parser.add_argument("--draft", help="folder of an EAGLE or EAGLE-3 head")
    args = parser.parse_args()

    with LLM(args.model, EngineConfig(spec=SpecConfig(spec="none"))) as llm:
        plain = llm.generate(PROMPT, OPTIONS)
    with LLM(args.model, EngineConfig(spec=SpecConfig(spec="auto", draft=args.draft, spec_steps=4))) as llm:
        drafted = llm.generate(PROMPT, OPTIONS)

    spec = drafted.spec
    print(f"{drafted.usage.completion_tokens} tokens, {spec.rounds} rounds with drafts")
    print(f"{spec.drafts_accepted} of {spec.drafts_offered} drafts accepted")
    print(f"looked up beside a head: {spec.lookup_accepted} of {spec.lookup_offered} drafts accepted")
    print(f"accept length {spec.accept_length:.2f} tokens a round, the model's own included")
    for correct, rounds in enumerate(spec.histogram):
        print(f"  {correct} drafts right: {rounds} rounds")
    # on a CPU with int8 or fp32 weights always; in bf16 sums that are grouped differently may round to another token
    print(f"same text as plain decoding: {drafted.text == plain.text}")


if __name__ == "__main__":
    main()
