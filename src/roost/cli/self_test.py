"""Self-test: an engine that generates the same text twice, and says how fast.

Runs in a process of its own, so that whatever ends it, be it an instruction that the CPU does not have, is something
that can be reported. Reads a configuration and writes what came of it, both JSON. Started by `engine_checks`.
"""

import json
import sys
import time
from typing import Any

from roost.config.options import EngineConfig
from roost.errors import RoostError
from roost.front.options import Options
from roost.library.llm import LLM, Output

PROMPT = "The sea was calm, and the"
NUM_TOKENS = 64


def self_test(config: EngineConfig) -> dict[str, Any]:
    """What an engine of this configuration does."""
    began = time.monotonic()
    with LLM(config=config) as llm:
        load_s = time.monotonic() - began
        first, _ = _generate(llm, "first")
        second, took_s = _generate(llm, "second")  # what is ready by now is ready in a server
        num_tokens, spec = len(second.choices[0].tokens), second.spec
        return {
            "model": llm.name,
            "load_s": round(load_s, 1),
            "tokens": num_tokens,
            "tokens_per_s": round(num_tokens / took_s, 1),
            "accept_length": round(spec.accept_length, 2) if spec.rounds else None,
            "same_twice": first.choices[0].tokens == second.choices[0].tokens,
            "failed_steps": llm.stats().failed_steps,
            "settings": llm.settings,
        }


def _generate(llm: LLM, salt: str) -> tuple[Output, float]:
    """An output that neither the prefix cache nor lookup helps, if the salt is new, and the seconds it took."""
    began = time.monotonic()
    output = llm.generate(PROMPT, Options(temperature=0, max_new_tokens=NUM_TOKENS, ignore_eos=True, cache_salt=salt))
    return output, time.monotonic() - began


def main() -> int:
    """Read the configuration and write what came of it, or why nothing did."""
    default = EngineConfig()
    groups = {name: type(getattr(default, name))(**given) for name, given in json.load(sys.stdin).items()}
    config = EngineConfig(**groups)
    try:
        said = self_test(config)
    except RoostError as error:
        said = {"error": str(error)}
    print(json.dumps(said, default=str))
    return 0


if __name__ == "__main__":
    sys.exit(main())
