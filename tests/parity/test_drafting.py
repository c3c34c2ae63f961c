"""What a drafter computes through pages, branches and copies is what it computes densely; no output would show it."""

from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from bench.heads import TargetHead
from roost.messages import SpecStats
from roost.models.model import Head
from roost.spec_shape import DraftKv, SpecShape
from tests.support.random_heads import make_head
from tests.support.stand_in_heads import NULL, Watched, forgetful
from tests.support.tiny_models import Served, configure, prompts, tiny
from tests.support.workload import DEPTHS, dense

CHAIN = SpecShape(steps=3, topk=1, tokens=4, draft_kv=DraftKv.PAIR)
TREE = SpecShape(steps=4, topk=4, tokens=16, draft_kv=DraftKv.PAIR)
WIDE = SpecShape(steps=5, topk=8, tokens=32, draft_kv=DraftKv.PAIR)
SHAPES = pytest.mark.parametrize("shape", [CHAIN, TREE, WIDE], ids=["chain", "tree", "wide"])
PLACES = [(page, page * 2 + rest) for page in (4, 64, 256) for rest in (0, 1, page - 1)] + [
    (1, 9),
    (16, 31),
    (512, 511),
]
PAGES = pytest.mark.parametrize(("page_size", "length"), PLACES)  # n mod page = 0, 1, page - 1


def drafted(prompt: tuple[int, ...], shape: SpecShape, page_size: int, head: Head, kind: str) -> list[list[Tensor]]:
    """The draft passes of the first round after a prompt, with their logits: [tokens, logits] of each."""
    watched = Watched(head)
    config = configure(
        page_size=page_size, spec=shape, context=1024, pool_tokens=40960, max_running=1, depth=0, chunk=1024
    )
    served = Served(tiny(kind).model(), config, head=watched)
    served.submit("r", prompt, 2)
    with patch("roost.sched.step_budget._FIRST", 1024):  # the whole prompt in one step
        served.run()
    passes = watched.passes[1 : shape.steps]  # the first extends over the prompt
    return [[each.tokens, head.logits(each.output)] for each in passes]


@PAGES
@SHAPES
@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_draft_logits_of_every_branch_and_step_equal_dense_ones(
    shape: SpecShape, page_size: int, length: int, name: str
) -> None:
    model = tiny("llama").model()
    head = make_head(name, model)
    (prompt,) = prompts(length, seed=length)
    with torch.inference_mode():
        last, aux_hidden = model.forward_with_aux(
            torch.tensor(prompt), torch.arange(length), dense(model), head.aux_layers
        )
        root = int(model.logits(last[-1:]).argmax())
        tokens, hidden = torch.tensor([*prompt[1:], root]), head.fuse(last, aux_hidden)
        attend = dense(head)
        output = head.forward(tokens, hidden, torch.arange(length), attend)[-1]
        scores, ids = head.logits(output[None])[0].log_softmax(-1).topk(shape.topk)
        # each path: its tokens, the hidden states they are read with, its score
        paths = [([int(t)], [output], float(s)) for t, s in zip(head.token_ids(ids), scores, strict=True)]
        for asked, logits in drafted(prompt, shape, page_size, head, "llama"):
            assert asked.tolist() == [path[-1] for path, _, _ in paths]
            grown = []
            for (path, states, score), found in zip(paths, logits, strict=True):
                every = head.forward(
                    torch.cat([tokens, torch.tensor(path)]),
                    torch.cat([hidden, torch.stack(states)]),
                    torch.arange(length + len(path)),
                    attend,
                )
                expected = head.logits(every[-1:])[0]
                torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
                falls, best = expected.log_softmax(-1).topk(shape.topk)
                for fall, token in zip(falls.tolist(), head.token_ids(best).tolist(), strict=True):
                    grown.append(([*path, token], [*states, every[-1]], score + fall))
            paths = sorted(grown, key=lambda each: -each[2])[: shape.topk]


@DEPTHS
@SHAPES
@pytest.mark.parametrize("page_size", [1, 4, 16, 64, 256, 512])
@pytest.mark.parametrize("chunk", [7, 512])
def test_the_target_as_its_own_drafter_is_right_in_every_round(
    shape: SpecShape, page_size: int, depth: int, chunk: int
) -> None:
    checkpoint = forgetful()
    model = checkpoint.model()
    config = configure(page_size=page_size, spec=shape, depth=depth, chunk=chunk, pool_tokens=65536, max_running=3)
    served = Served(model, config, head=TargetHead(model))
    lengths = (5, page_size % 97 + 3, 64, 31)
    for number, prompt in enumerate(prompts(*lengths, seed=3)):
        served.submit(f"r{number}", (NULL, *prompt[1:]), 40)
    served.run()
    for number in range(len(lengths)):
        assert_all_accepted(served.finish(f"r{number}").spec, shape)


def assert_all_accepted(spec: SpecStats, shape: SpecShape) -> None:
    """Every live round took its deepest path."""
    assert spec.rounds > 0
    assert spec.histogram == (*[0] * (shape.accept_max - 1), spec.rounds), spec
