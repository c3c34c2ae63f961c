"""The default model in its default form says one text: however its prompt is cut, whatever drafts, and beside whom."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from roost import LLM
from roost.attention.registry import NUMBA
from roost.messages import Submit
from roost.models.decoder import Decoder
from roost.models.model import Head
from roost.sampling.params import SamplingParams
from roost.spec_shape import PLAIN, DraftKv, SpecShape
from roost.weights.draft import load_head
from roost.weights.pull import find_head
from tests.parity.conftest import default_config
from tests.support.spec_configs import AUTO_CHAIN
from tests.support.tiny_models import BACKEND, CPU, Served, configure

NUM_NEW = 24
WEIGHTS = "gguf" if BACKEND is NUMBA else "int8"  # what `auto` is on a CPU
SAID = (
    "Write a Python function that sorts a list of names, then explain it.",
    "List six animals, one a line, then the same six in reverse order.",
    "Here is a story. "
    + "The owl flew over the old mill, and the river ran on below. " * 14
    + "Say it in one sentence.",
)
CHAIN = SpecShape(steps=4, topk=1, tokens=5, draft_kv=DraftKv.PAIR)
TREE = SpecShape(steps=4, topk=4, tokens=16, draft_kv=DraftKv.PAIR)
NGRAM = SpecShape(steps=4, topk=1, tokens=5, reads_history=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A way to serve the same requests."""

    spec: SpecShape = PLAIN
    auto: bool = False
    chunk: int = 512
    page_size: int = 16
    depth: int = 1
    is_alone: bool = False  # one request at a time
    is_warm: bool = False  # the prompts are in the prefix cache
    kv_cache_dtype: str = "auto"


FORMS = {
    "alone": Form(is_alone=True),
    "chunks-of-100": Form(chunk=100),
    "chunks-of-13": Form(chunk=13, depth=0),
    "prefix-hits": Form(is_warm=True, chunk=64),
    "auto": Form(spec=AUTO_CHAIN, auto=True),
    "chain": Form(spec=CHAIN, page_size=1),
    "chain-alone": Form(spec=CHAIN, is_alone=True, chunk=200),
    "tree": Form(spec=TREE),
    "ngram": Form(spec=NGRAM, page_size=64),
}


class Model:
    """The default model as it is served on a CPU, and its own head."""

    def __init__(self, llm: LLM, weights: str) -> None:
        model = llm._running.executor.runner.passes.model
        folder = find_head("default")
        assert isinstance(model, Decoder) and folder is not None
        self._model, self._weights = model, weights
        self._head = load_head(folder, "eagle3", model, layer_ids=None, weights=weights, device=CPU)
        self._prompts = [llm.language.chat_tokens([{"role": "user", "content": said}]) for said in SAID]

    def says(self, form: Form) -> list[tuple[int, ...]]:
        """The outputs of every prompt, greedy and with a seed."""
        head: Head | None = self._head if form.spec.pair else None
        config = configure(
            depth=form.depth,
            page_size=form.page_size,
            chunk=form.chunk,
            pool_tokens=4096,
            context=512,
            spec=form.spec,
            auto=form.auto,
            kv_cache_dtype=BACKEND.kv_cache_dtype(form.kv_cache_dtype, self._weights),
        )
        served = Served(self._model, config, head=head)
        if form.is_warm:
            for number, prompt in enumerate(self._prompts):
                served.submit(f"warm{number}", prompt[: -7 - number], 1)
            served.run()
        names = []
        for number, prompt in enumerate(self._prompts):
            for seed in (None, 5):
                sampling = (
                    SamplingParams(temperature=0.0) if seed is None else SamplingParams(temperature=0.8, seed=seed)
                )
                names.append(f"r{number}-{seed}")
                served.post(Submit(request_id=names[-1], tokens=prompt, max_new_tokens=NUM_NEW, sampling=sampling))
                if form.is_alone:
                    served.run()
        served.run()
        served.executor.close()
        return [served.output(name) for name in names]


@pytest.fixture(scope="module", params=[WEIGHTS, pytest.param("fp32", marks=pytest.mark.full)])
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    config = default_config(request.param)
    with LLM("default", replace(config, model=replace(config.model, backend=BACKEND.name))) as llm:
        yield Model(llm, request.param)


@pytest.fixture(scope="module")
def plain(model: Model) -> list[tuple[int, ...]]:
    """What plain decoding says to all of them at once."""
    return model.says(Form())


@pytest.mark.full
def test_with_int8_kv_the_text_is_one_too(model: Model) -> None:
    said = model.says(Form(kv_cache_dtype="int8"))
    for form in (Form(is_warm=True, chunk=64, kv_cache_dtype="int8"), Form(spec=TREE, kv_cache_dtype="int8")):
        assert model.says(form) == said


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_the_text_is_that_of_plain_decoding(form: Form, model: Model, plain: list[tuple[int, ...]]) -> None:
    assert model.says(form) == plain
