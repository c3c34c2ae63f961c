"""The library: what it returns, raises and lets go of, on a checkpoint whose output is known."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from roost import LLM, EngineConfig, MemoryConfig, ModelConfig, Options, SchedConfig
from roost.errors import CapacityError, ConfigError, RequestError
from roost.front.speculation import since, total
from roost.library.session import Session
from roost.messages import GetStats, Stats
from tests.support import speculating_engine as speculating
from tests.support.chain_model import save_chain, token

GREEDY = Options(temperature=0, max_new_tokens=6)
ENDLESS = Options(temperature=0, ignore_eos=True)  # to the end of the context
SPELT = ("a", "b", "hell", "o", "!", "1", "2")  # "b", "hell"… follow "a"
AFTER_A = "bhello!12"
CONFIG = EngineConfig(
    model=ModelConfig(weights="fp32", threads=1),
    memory=MemoryConfig(page_size=4, pool_tokens=8192),
    sched=SchedConfig(max_running=4),
)
WAIT_S = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chain(tmp_path_factory.mktemp("chain"), *SPELT)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), CONFIG) as llm:
        yield llm


def idle(llm: LLM) -> Stats:
    """How things stand once no request is left: an abort is not waited for by who sent it."""
    for _ in range(10_000):
        stats = llm.stats()
        if not stats.running and not stats.queued:
            return stats
    raise AssertionError(f"a request never ended: {stats}")


def in_thread(work: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """Something that runs in a thread of its own, and the place for what it returns or raises."""
    found: list[object] = []

    def run() -> None:
        try:
            found.append(work())
        except (RequestError, CapacityError) as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found


# --- what comes back -------------------------------------------------------------------------------------------


def test_generate_continues_a_text_or_token_ids(llm: LLM) -> None:
    output = llm.generate("xa", GREEDY)
    choice = output.choices[0]
    assert output.text == choice.text == AFTER_A
    assert choice.tokens == tuple(map(token, SPELT[1:7]))
    assert (choice.finish_reason, choice.matched, choice.logprobs, output.prompt_logprobs) == ("length", None, (), ())
    assert (output.usage.prompt_tokens, output.usage.completion_tokens) == (2, 6)
    assert llm.generate([token("x"), token("a")], GREEDY).choices[0].tokens == choice.tokens


def test_generate_all_answers_in_the_order_of_the_prompts(llm: LLM) -> None:
    outputs = llm.generate_all(["a", "hell", "1", "b", "o", "!"], replace(GREEDY, max_new_tokens=1))
    assert [output.text for output in outputs] == ["b", "o", "2", "hell", "!", "1"]
    assert llm.generate_all([], GREEDY) == []


def test_several_outputs_of_each_of_several_prompts(llm: LLM) -> None:
    outputs = llm.generate_all(["a", "o"], replace(GREEDY, n=3, max_new_tokens=2))
    assert [[choice.text for choice in output.choices] for output in outputs] == [["bhell"] * 3, ["!1"] * 3]


def test_outputs_of_one_seed_are_the_same_again_and_those_of_one_prompt_differ(tmp_path: Path) -> None:
    with LLM(str(save_chain(tmp_path, *SPELT, certain=4.0)), CONFIG) as llm:
        options = Options(n=4, max_new_tokens=12, seed=7)
        texts = [[choice.text for choice in llm.generate("a", options).choices] for _ in range(2)]
        assert texts[0] == texts[1] and len(set(texts[0])) == 4
        unseeded = {llm.generate("a", Options(max_new_tokens=12)).text for _ in range(3)}
        assert len(unseeded) > 1


def test_logprobs_come_if_asked_for(llm: LLM) -> None:
    output = llm.generate("xab", replace(GREEDY, max_new_tokens=2, logprobs=2, prompt_logprobs_from=0))
    assert [entry.top_logprobs[0][0] for entry in output.choices[0].logprobs] == [token("hell"), token("o")]
    assert all(entry.logprob == pytest.approx(0, abs=1e-6) for entry in output.choices[0].logprobs)
    assert [len(entry.top_logprobs) for entry in output.prompt_logprobs] == [2, 2]
    assert output.prompt_logprobs[0].logprob == pytest.approx(-60, abs=0.05)  # "a" after "x"
    assert output.prompt_logprobs[1].logprob == pytest.approx(0, abs=1e-3)  # "b" after "a"


def test_chat_answers_in_the_templates_form(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi <|im_end|>"}]
    tokens = llm.language.chat_tokens(messages)
    assert tokens.count(token("<|im_end|>")) == 1, "what a user spells is text"
    assert llm.chat(messages, GREEDY).choices[0].tokens == llm.generate(tokens, GREEDY).choices[0].tokens


def test_a_stream_gives_the_same_in_pieces(llm: LLM) -> None:
    pieces = list(llm.stream("a", GREEDY))
    assert "".join(piece.text for piece in pieces) == AFTER_A
    assert len(pieces) > 2 and pieces[-1].finished is not None and pieces[-1].finished.reason == "length"
    chatted = list(llm.stream_chat([{"role": "user", "content": "hi"}], GREEDY))
    assert "".join(piece.text for piece in chatted) == llm.chat([{"role": "user", "content": "hi"}], GREEDY).text


def test_a_prompt_asked_for_again_is_found_in_the_cache_until_it_is_flushed(llm: LLM) -> None:
    llm.flush_cache()
    assert [llm.generate("x" * 21, GREEDY).usage.cached_tokens for _ in range(2)] == [0, 20]
    llm.flush_cache()
    assert llm.generate("x" * 21, GREEDY).usage.cached_tokens == 0
    assert llm.generate("x" * 21, replace(GREEDY, cache_salt="another")).usage.cached_tokens == 0


def test_stats_say_how_things_stand(llm: LLM) -> None:
    before = idle(llm)
    llm.generate("a", GREEDY)
    after = idle(llm)
    assert after.completion_tokens - before.completion_tokens == 6
    assert dict(after.endings)["length"] - dict(before.endings).get("length", 0) == 1
    assert after.pools[0].leased == 0


def test_the_sum_over_outputs_is_what_the_engine_counted_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roost.library.llm.start", speculating.start)
    options = Options(temperature=0, ignore_eos=True, max_new_tokens=21, n=2)
    with LLM() as llm:
        outputs = [*llm.generate_all(["a", "bc", "d"], options), llm.chat([{"role": "user", "content": "x"}], options)]
        (*_, last) = llm.stream("y", replace(options, n=1))
        assert last.finished is not None
        sums = total([*(choice.spec for output in outputs for choice in output.choices), last.finished.spec])
        assert sums == llm.stats().spec
    assert sums.overshoot > 0 and all(sums.histogram) and sums.rounds == sum(sums.histogram)
    assert all(output.spec == output.choices[0].spec and output.spec.accept_length > 1 for output in outputs)


def test_a_model_without_a_drafter_offers_no_drafts(llm: LLM) -> None:
    before = idle(llm).spec
    outputs = llm.generate_all(["a", "b"], replace(GREEDY, n=2))
    sums = total(choice.spec for output in outputs for choice in output.choices)
    assert sums == since(before, idle(llm).spec)
    assert (sums.drafts_offered, sums.drafts_accepted, sums.overshoot) == (0, 0, 0)


# --- what is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "options", "status", "param"),
    [
        ("a", Options(temperature=-1.0), 400, "temperature"),
        ("a", Options(temperature=float("nan")), 400, "temperature"),
        ("a", Options(top_p=0.0), 400, "top_p"),
        ("a", Options(n=0), 400, "n"),
        ("a", Options(n=65), 400, "n"),
        ("a", Options(stop=("",)), 400, "stop"),
        ("a", Options(stop_token_ids=(9999,)), 400, "stop_token_ids"),
        ("a", Options(logit_bias=((9999, 1.0),)), 400, "logit_bias"),
        ("a", Options(timeout_s=0.0), 400, "timeout"),
        ("a", Options(max_new_tokens=5000), 413, "tokens"),
        ("", Options(), 400, "tokens"),
        ((9999,), Options(), 400, "tokens"),
        ("\ud800", Options(), 400, "text"),
        ("x" * 5000, Options(), 413, "tokens"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_parameter(
    llm: LLM, prompt: str, options: Options, status: int, param: str
) -> None:
    with pytest.raises(RequestError) as refused:
        llm.generate(prompt, options)
    assert (refused.value.status, refused.value.param) == (status, param)
    assert str(refused.value).count(f"{param}: ") == 1
    assert llm.generate("a", GREEDY).text == AFTER_A, "the next request is served"


BIG = 10**5000
WRONG = [
    ("max_new_tokens", ("8", 2.5, True, BIG)),
    ("min_new_tokens", ("8", None, 1.0)),
    ("priority", ("high", None, 0.5)),
    ("logit_bias", ({5: 1.0}, ((5,),), ((5, "1"),), (("5", 1.0),), 3, ((BIG, 1.0),))),
    ("temperature", ("hot", None, [1.0], BIG)),
    ("seed", ("7", 7.0, BIG)),
    ("stop", ("text", 3, (b"x",), (None,))),
    ("stop_token_ids", (5, "5", (1.5,), (True,))),
    ("ignore_eos", (1, "yes", None)),
    ("skip_special_tokens", (0, "no")),
    ("no_stop_trim", (0, "no")),
    ("n", ("2", 2.0, None, True)),
    ("logprobs", ("2", 1.5, True)),
    ("prompt_logprobs_from", ("0", 0.0)),
    ("timeout_s", ("5", (5,))),
    ("cache_salt", (5, None, b"x")),
    ("grammar", (5, None, b"x", {"type": "object"})),
    ("top_k", ("5", 5.0, None)),
    ("top_p", ("1", None)),
    ("min_p", ("0", None)),
    ("repetition_penalty", ("1", None)),
    ("presence_penalty", ("1", None)),
    ("frequency_penalty", ("1", None)),
]


def test_a_value_of_the_wrong_type_is_refused_by_name_and_others_go_on(llm: LLM) -> None:
    assert {name for name, _ in WRONG} == set(Options.__dataclass_fields__)
    running = llm.stream("a", replace(ENDLESS, max_new_tokens=300))
    next(running)
    session = llm.session()
    for name, values in WRONG:
        for value in values:
            options = Options(**{name: value})
            calls = (
                lambda options=options: llm.generate("a", options),
                lambda options=options: next(llm.stream("a", options)),
                lambda options=options: next(session.generate("a", options)),
            )
            for call in calls:
                with pytest.raises(RequestError, match=r"must be .* got") as refused:
                    call()
                assert (refused.value.status, refused.value.param) == (400, name)
    session.close()
    assert sum(len(piece.tokens) for piece in running) == 299, "whoever ran before runs on"


@pytest.mark.parametrize(
    ("call", "param"),
    [
        (lambda llm, session: llm.generate(["a", "b"], GREEDY), "prompt"),
        (lambda llm, session: llm.generate([1.5, 2], GREEDY), "prompt"),
        (lambda llm, session: llm.generate([5, True], GREEDY), "prompt"),
        (lambda llm, session: llm.generate(None, GREEDY), "prompt"),
        (lambda llm, session: llm.generate(b"ab", GREEDY), "prompt"),
        (lambda llm, session: llm.generate(np.array([[5, 6]]), GREEDY), "prompt"),
        (lambda llm, session: llm.stream({5, 6}, GREEDY), "prompt"),
        (lambda llm, session: llm.generate("a", {"temperature": 0}), "options"),
        (lambda llm, session: llm.generate("a", None), "options"),
        (lambda llm, session: llm.chat("hello", GREEDY), "messages"),
        (lambda llm, session: llm.chat([], GREEDY), "messages"),
        (lambda llm, session: llm.chat(["hello"], GREEDY), "messages[0]"),
        (lambda llm, session: llm.stream_chat([{"role": 5}], GREEDY), "messages[0]"),
        (lambda llm, session: llm.session(id=5), "session_id"),
        (lambda llm, session: llm.session(ttl_s="5"), "ttl_s"),
        (lambda llm, session: llm.session(ttl_s=True), "ttl_s"),
        (lambda llm, session: llm.session(max_tokens="5"), "max_tokens"),
        (lambda llm, session: llm.session(cache_salt=5), "cache_salt"),
        (lambda llm, session: session.rewind(length="2"), "length"),
        (lambda llm, session: session.rewind(turn=0.0), "turn"),
        (lambda llm, session: session.fork(id=["x"]), "new_id"),
        (lambda llm, session: session.append([5, True]), "tokens"),
        (lambda llm, session: session.append(5), "tokens"),
        (lambda llm, session: session.append([{"role": "user"}, 5]), "messages[1]"),
        (lambda llm, session: session.append("x", turn="0"), "turn"),
        (lambda llm, session: next(session.chat("hello")), "messages"),
    ],
)
def test_whatever_is_given_is_refused_by_name_or_served(
    llm: LLM, call: Callable[[LLM, Session], object], param: str
) -> None:
    with llm.session() as session:
        with pytest.raises(RequestError) as refused:
            call(llm, session)
        assert (refused.value.status, refused.value.param) == (400, param)
        assert session.state().length == 0
    assert llm.generate("a", GREEDY).text == AFTER_A, "the next request is served"


def test_numbers_of_numpy_are_as_good_as_plain_ones(llm: LLM) -> None:
    ids = np.array([token("x"), token("a")])
    options = Options(
        temperature=np.float32(0), max_new_tokens=np.int64(6), seed=np.uint8(3), ignore_eos=np.bool_(True)
    )  # type: ignore[arg-type]
    assert llm.generate(ids, options).text == llm.generate(list(ids), options).text == AFTER_A  # type: ignore[arg-type]
    with llm.session() as session:
        assert session.append(ids).prompt_tokens == 2  # type: ignore[arg-type]
        assert session.rewind(length=np.int16(1)).length == 1  # type: ignore[arg-type]


def test_one_bad_prompt_of_several_ends_the_others(llm: LLM) -> None:
    with pytest.raises(RequestError):
        llm.generate_all([(token("a"),), (9999,), (token("b"),)], ENDLESS)
    assert idle(llm).pools[0].leased == 0


def test_a_stream_has_one_output(llm: LLM) -> None:
    with pytest.raises(RequestError, match="n: a stream has one output"):
        next(iter(llm.stream("a", Options(n=2))))


def test_a_request_that_takes_too_long_says_so(llm: LLM) -> None:
    with pytest.raises(RequestError, match="timeout: not done within 50 ms") as refused:
        llm.generate("a", replace(ENDLESS, timeout_s=0.05))
    assert refused.value.status == 504


def test_a_model_without_a_template_takes_no_conversation(tmp_path: Path) -> None:
    folder = save_chain(tmp_path, *SPELT)
    (folder / "tokenizer_config.json").unlink()
    with LLM(str(folder), CONFIG) as llm:
        assert llm.generate("a", GREEDY).text == AFTER_A
        with pytest.raises(RequestError, match="messages: this model has no chat template"):
            llm.chat([{"role": "user", "content": "a"}], GREEDY)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (ModelConfig(weights="int3"), "--weights must be one of auto, int8, fp32, bf16, fp8, int4, gguf, got int3"),
        (ModelConfig(device="tpu"), "--device must be one of auto, cpu, cuda, got tpu"),
        (ModelConfig(threads=0), r"--threads must be in \[1, 1024\], got 0"),
        (ModelConfig(threads=3_000_000_000), r"--threads must be in \[1, 1024\], got 3000000000"),
    ],
)
def test_a_model_that_cannot_run_like_this_is_refused_with_the_flag(
    folder: Path, config: ModelConfig, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        LLM(str(folder), replace(CONFIG, model=config))


def test_a_model_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="--model: there is no file or folder nowhere"):
        LLM("nowhere", CONFIG)


# --- ends ------------------------------------------------------------------------------------------------------


def test_leaving_a_stream_early_ends_its_request(llm: LLM) -> None:
    ended = dict(idle(llm).endings).get("abort", 0)
    for piece in llm.stream("a", ENDLESS):
        if piece.tokens:
            break
    assert dict(idle(llm).endings)["abort"] == ended + 1
    assert idle(llm).pools[0].leased == 0


def test_a_stream_nobody_reads_asks_for_nothing(llm: LLM) -> None:
    before = sum(count for _, count in idle(llm).endings)
    llm.stream("a", ENDLESS)
    assert sum(count for _, count in idle(llm).endings) == before


def test_threads_are_served_side_by_side(llm: LLM) -> None:
    texts = ["a", "b", "hell", "o", "!", "1"]
    threads = [
        in_thread(lambda text=text: [llm.generate(text, GREEDY).choices[0].tokens for _ in range(5)]) for text in texts
    ]
    for thread, _ in threads:
        thread.join(WAIT_S)
    alone = [[llm.generate(text, GREEDY).choices[0].tokens] * 5 for text in texts]
    assert [found for _, found in threads] == [[each] for each in alone]


def test_a_cache_in_use_is_not_flushed(llm: LLM) -> None:
    stream = llm.stream("a", ENDLESS)
    next(stream)
    with pytest.raises((RequestError, CapacityError)):
        llm.flush_cache()
    stream.close()
    idle(llm)
    llm.flush_cache()


def test_closing_ends_what_runs_what_waits_and_what_was_only_just_asked_for(folder: Path) -> None:
    llm = LLM(str(folder), CONFIG)
    stream = llm.stream("a", ENDLESS)
    next(stream)
    asked = [in_thread(lambda: llm.generate("b", ENDLESS).choices[0].finish_reason) for _ in range(8)]
    llm.close()
    for thread, found in asked:
        thread.join(WAIT_S)
        assert not thread.is_alive(), "it waits for ever"
        assert found == ["abort"] or isinstance(found[0], CapacityError), found
    assert list(stream)[-1].finished is not None


def test_a_request_posted_right_before_the_end_does_not_keep_it_from_ending(folder: Path) -> None:
    llm = LLM(str(folder), CONFIG)
    hold = threading.Event()
    llm._running.engine.post(GetStats(), lambda event: bool(hold.wait(WAIT_S)))  # the engine's thread is busy
    asked, found = in_thread(lambda: llm.generate("b", ENDLESS).choices[0].finish_reason)
    closing, _ = in_thread(llm.close)
    hold.set()
    asked.join(WAIT_S)
    closing.join(WAIT_S)
    assert not asked.is_alive() and not closing.is_alive()
    assert found == ["abort"] or isinstance(found[0], CapacityError), found


def test_a_closed_engine_refuses_and_closes_again(folder: Path) -> None:
    with LLM(str(folder), CONFIG) as llm:
        pass
    llm.close()
    for call in (lambda: llm.generate("a", GREEDY), lambda: next(iter(llm.stream("a"))), llm.stats, llm.flush_cache):
        with pytest.raises(CapacityError, match="the engine has ended"):
            call()


@pytest.mark.parametrize("failure", [AssertionError("a broken promise"), KeyError("a bug")])
def test_an_engine_that_breaks_tells_everybody_who_waits(
    folder: Path, failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(str(folder), CONFIG)
    stream = llm.stream("a", ENDLESS)
    next(stream)

    def break_down() -> None:
        raise failure

    monkeypatch.setattr(llm._running.engine, "tick", break_down)
    reading, found = in_thread(lambda: list(stream))
    reading.join(WAIT_S)
    assert isinstance(found[0], CapacityError) and "the engine has ended" in str(found[0])
    with pytest.raises(CapacityError, match="the engine has ended") as refused:
        llm.generate("a", GREEDY)
    assert refused.value.__cause__ is failure
    llm.close()


# --- what is imported ------------------------------------------------------------------------------------------

WITHOUT_SERVER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("msgspec", "zmq", "starlette", "uvicorn", "prometheus_client", "fastapi", "anyio"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocker())
import roost
with roost.LLM(sys.argv[1]) as llm:
    print(llm.generate("a", roost.Options(temperature=0, max_new_tokens=3)).text)
"""


def python(*args: str) -> str:
    """What a fresh interpreter prints."""
    ran = subprocess.run([sys.executable, *args], capture_output=True, text=True, check=False, timeout=WAIT_S * 2)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def test_importing_the_package_alone_imports_no_torch() -> None:
    code = "import sys, roost; print(sorted({'torch', 'numpy', 'tokenizers'} & set(sys.modules)), roost.__version__)"
    assert python("-c", code).startswith("[] ")


def test_the_library_needs_none_of_the_servers_packages(folder: Path) -> None:
    assert python("-c", WITHOUT_SERVER, str(folder)) == "bhello"


def test_the_model_of_the_configuration_counts_where_none_is_named(folder: Path) -> None:
    with LLM(config=replace(CONFIG, model=replace(CONFIG.model, model=str(folder)))) as llm:
        text = llm.generate("a", GREEDY).text
        assert text and AFTER_A.startswith(text)
        assert llm.name == folder.name
