"""KV slots that trees hold against slots they use, without a device: `python -m bench.tree_slots`.

The real control plane over an executor that answers at once with two accepted tokens a round. After each step: slots of
all pages of the running requests' leases, over tokens that are committed. Both are summed over the steps that decode,
for short answers (prompts of 48 tokens, 64 new ones) and longer ones (64 and 256). Beside them the reserve of a round,
and plain decoding, whose ratio is the last page's alone.
"""

import sys

from bench.host import VOCAB, Instant
from roost.clock import SystemClock
from roost.config.options import EngineConfig, MemoryConfig, SchedConfig, SpecConfig
from roost.config.resolve import resolve
from roost.config.resolved import ModelTraits
from roost.messages import Event, Submit
from roost.sched.engine import Engine

TREES = {
    "plain": SpecConfig(),
    "K4 S4 T16": SpecConfig(spec="eagle3", draft="head", spec_topk=4, spec_steps=4, spec_tokens=16, spec_lookup="off"),
    "K8 S5 T32": SpecConfig(spec="eagle3", draft="head", spec_topk=8, spec_steps=5, spec_tokens=32, spec_lookup="off"),
}
ANSWERS = {"short": (48, 64), "longer": (64, 256)}  # tokens of the prompt, and new ones
PAGE_SIZES = (1, 16, 64, 256)
AT_ONCE = 4
ACCEPTED = 2


def held_over_used(spec: SpecConfig, page_size: int, depth: int, prompt_len: int, new_tokens: int) -> tuple[float, int]:
    """Slots held over slots used, and the reserve of a round."""
    config = EngineConfig(
        memory=MemoryConfig(page_size=page_size, pool_tokens=2**16),
        sched=SchedConfig(context=1024, max_running=AT_ONCE, overlap=depth == 1),
        spec=spec,
    )
    resolved = resolve(config, ModelTraits(vocab_size=VOCAB))
    engine = Engine(resolved, Instant(min(ACCEPTED, resolved.spec.accept_max)), SystemClock())
    for number in range(AT_ONCE):
        prompt = tuple(range(number * prompt_len, (number + 1) * prompt_len))  # nothing is shared
        engine.post(Submit(request_id=str(number), tokens=prompt, max_new_tokens=new_tokens), _ignore)
    held = used = 0
    while engine.has_work:
        engine.tick()
        for each in engine.state.running:
            if each.lease.settled_len >= prompt_len:
                held += len(each.lease.pages[0]) * page_size
                used += each.lease.settled_len
    return held / used, resolved.reserves[0]


def _ignore(event: Event) -> None:
    pass


def main() -> int:
    """Print the table."""
    print(f"{'':10} {'page':>5} {'reserve':>8}  " + "  ".join(f"{name}, depth {d}" for name in ANSWERS for d in (0, 1)))
    for name, spec in TREES.items():
        for page_size in PAGE_SIZES:
            found = [held_over_used(spec, page_size, depth, *answer) for answer in ANSWERS.values() for depth in (0, 1)]
            ratios = "  ".join(f"{ratio:14.2f}" for ratio, _ in found)
            print(f"{name:10} {page_size:>5} {found[0][1]:>8}  {ratios}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
