"""What is trained is what is served: the head's passes equal drafting, and training makes it agree with its target."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import rms_norm

from roost import LLM, EngineConfig, MemoryConfig, ModelConfig, Options, SchedConfig, SpecConfig
from roost.cli.main import main
from roost.cli.prompts import read_turns
from roost.errors import ConfigError
from roost.models.decoder import Decoder
from roost.models.eagle import Eagle3
from roost.models.model import Head
from roost.train.answering import kept_answers, make_answers
from roost.train.answers import TEMPERATURES, TrainingAnswer
from roost.train.head import HeadShape, TrainableHead
from roost.train.head_checkpoint import (
    head_shape,
    read_head,
    warm_start,
    weight_sizes,
    with_vocabulary,
    write_head,
)
from roost.train.job import Job
from roost.train.loop import Agreement, Recipe, Trainer, TrainingState, schedule
from roost.train.losses import LOSSES
from roost.train.packing import PackedRows, pack, split
from roost.train.target import run_target
from roost.weights.draft import default_aux_layers, load_head
from tests.support.tiny_folder import write_model
from tests.support.tiny_models import CPU, VOCAB, tiny
from tests.support.workload import dense

NUM_STEPS = 3
IDS = torch.arange(0, VOCAB, 2)  # the draft vocabulary


def shape_of(model: Decoder) -> HeadShape:
    return head_shape(model.config, 3, len(IDS), model.config.intermediate_size + 8)


def started(kind: str) -> tuple[Decoder, TrainableHead]:
    """A target and a head as training starts, its weights rounded as a checkpoint rounds them."""
    model = tiny(kind).model()
    state = warm_start(tiny(kind).reference.state_dict(), model.config, shape_of(model), IDS)
    return model, TrainableHead(shape_of(model), {name: each.bfloat16() for name, each in state.items()}, CPU)


def drafted(model: Decoder, head: Head, tokens: Tensor, place: int, step: int) -> Tensor:
    """Logits after `step` further drafts behind a place, as serving makes them: pass by pass."""
    positions = torch.arange(len(tokens))
    last, aux_hidden = model.forward_with_aux(tokens, positions, dense(model), head.aux_layers)
    hidden = head.fuse(last, aux_hidden)[: place + 1]
    for more in range(step + 1):
        length = place + 1 + more
        output = head.forward(tokens[1 : length + 1], hidden, positions[:length], dense(head))
        hidden = torch.cat([hidden, output[-1:]])
    return head.logits(hidden[-1:])[0]


@pytest.mark.parametrize(
    "kind", ["llama", "gemma3-untied", "qwen2", "qwen3-moe", "gpt-oss", "lfm2", "qwen3.5", "gemma4"]
)
def test_an_unrolled_step_is_a_draft(kind: str, tmp_path: Path) -> None:
    model, head = started(kind)
    write_head(tmp_path, head.state(), head.shape, IDS)
    served = load_head(tmp_path, "eagle3", model, layer_ids=None, weights="fp32", device=CPU)
    tokens = torch.from_numpy(np.random.default_rng(1).integers(0, VOCAB, 20))
    with torch.no_grad():
        lesson = run_target(model, tokens[None], torch.zeros_like(tokens)[None], served.aux_layers, IDS)
        embedded = [model.embed(tokens.roll(-1 - step))[None] for step in range(NUM_STEPS)]
        found = head.unroll(embedded, lesson.features, lesson.seen)
        for step in range(NUM_STEPS):
            for place in (0, 5, 11):
                wanted = drafted(model, served, tokens, place, step)
                torch.testing.assert_close(found[step][0, place], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "kind", ["llama", "mistral", "qwen3-window", "qwen3-moe", "gpt-oss", "lfm2-biased", "qwen3.5-moe", "gemma4"]
)
def test_an_answer_in_the_middle_of_a_row_is_taught_as_if_it_were_alone(kind: str) -> None:
    model = tiny(kind).model()
    tokens = torch.from_numpy(np.random.default_rng(2).integers(0, VOCAB, (1, 30)))
    owners = torch.tensor([[0] * 9 + [1] * 17 + [-1] * 4])
    aux_layers = default_aux_layers(len(model.config.layers))
    packed = run_target(model, tokens, owners, aux_layers, IDS)
    alone = run_target(model, tokens[:, 9:26], torch.zeros(1, 17), aux_layers, IDS)
    torch.testing.assert_close(packed.features[:, 9:26], alone.features, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(packed.logits[:, 9:26], alone.logits, rtol=1e-3, atol=1e-3)


def bigrams() -> tuple[Decoder, dict[str, Tensor]]:
    """A target whose next token depends on the last alone: something that a head can learn in no time."""
    state = {name: tensor.clone() for name, tensor in tiny("llama").reference.state_dict().items()}
    for name, tensor in state.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    return Decoder(tiny("llama").model().config, state, "fp32", CPU), state


def wanderings(model: Decoder, number: int, length: int) -> tuple[PackedRows, PackedRows]:
    """What such a target says at a temperature, one answer a row; a fifth of it is held out."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(VOCAB, (number, 1), generator=generator)
    for _ in range(length - 1):
        last = model.forward(tokens[:, -1], torch.zeros(number, dtype=torch.int64), dense(model))
        following = torch.multinomial(model.logits(last).softmax(-1), 1, generator=generator)
        tokens = torch.cat([tokens, following], dim=1)
    answers = [
        TrainingAnswer(prompt=tuple(each[:2]), output=tuple(each[2:]), temperature=1.0) for each in tokens.tolist()
    ]
    learn, held_out = split(answers, 0.2)
    return pack(learn, length), pack(held_out, length)


def trainer_of(epochs: int, budget_s: float | None = None, loss: str = "kl", micro_rows: int | None = None) -> Trainer:
    model, state = bigrams()
    head = TrainableHead(shape_of(model), warm_start(state, model.config, shape_of(model), IDS), CPU)
    recipe = Recipe(
        num_steps=NUM_STEPS,
        loss=loss,
        batch_rows=8,
        micro_rows=micro_rows,
        epochs=epochs,
        learning_rate=5e-3,
        budget_s=budget_s,
    )
    return Trainer(model, head, default_aux_layers(3), IDS, recipe)


def score(standing: TrainingState) -> float:
    return Agreement(greedy=standing.held_out, drawn=standing.held_out_drawn).score


@pytest.mark.parametrize("loss", LOSSES)
def test_training_makes_the_head_agree_and_the_best_is_kept(loss: str) -> None:
    trainer = trainer_of(epochs=9, loss=loss)
    learn, held_out = wanderings(bigrams()[0], 240, 24)
    before, kept, seen = trainer.agreement(held_out), [], []
    trainer.train(
        learn,
        held_out,
        report=lambda standing: seen.append(standing.loss),
        evaluated=lambda standing, state: kept.append((score(standing), state is not None)),
    )
    after = trainer.agreement(held_out)
    assert all(late > early + 0.15 for early, late in zip(before.greedy, after.greedy, strict=True)), (before, after)
    assert after.score > before.score
    assert seen[-1] < seen[0] and len(kept) == 9
    assert [is_kept for _, is_kept in kept] == [
        score > max((before for before, _ in kept[:at]), default=0.0) for at, (score, _) in enumerate(kept)
    ]
    best = Agreement(greedy=trainer.standing.best, drawn=trainer.standing.best_drawn)
    assert best.score == max(score for score, _ in kept)


def test_training_that_is_interrupted_goes_on_with_what_it_had(tmp_path: Path) -> None:
    learn, held_out = wanderings(bigrams()[0], 60, 16)
    first, path = trainer_of(epochs=2), tmp_path / "checkpoint.safetensors"

    def report(standing: TrainingState) -> None:
        if standing.update == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        first.train(learn, held_out, report=report, evaluated=lambda standing, state: None, checkpoint=path)
    second = trainer_of(epochs=2)
    second.load(path)
    assert second.standing.update == 8
    for name, weight in second.head.state().items():
        assert torch.equal(weight, first.head.state()[name]), name
    for mine, theirs in zip(second.head.parameters(), first.head.parameters(), strict=True):
        kept, wanted = second._optimizer.state[mine], first._optimizer.state[theirs]
        assert kept.keys() == wanted.keys() and all(torch.equal(kept[name], wanted[name]) for name in wanted)
    seen: list[int] = []
    second.train(
        learn,
        held_out,
        report=lambda standing: seen.append(standing.update),
        evaluated=lambda standing, state: None,
        checkpoint=path,
    )
    assert seen == list(range(9, 2 * (len(learn) // 8) + 1))


def test_a_budget_of_seconds_ends_training_with_a_head_kept() -> None:
    learn, held_out = wanderings(bigrams()[0], 40, 16)
    trainer, kept = trainer_of(epochs=10**6, budget_s=1e-9), []
    trainer.train(
        learn, held_out, report=lambda standing: None, evaluated=lambda standing, state: kept.append(standing.update)
    )
    assert trainer.standing.update == 0 and kept == [0]


def test_who_has_had_enough_gets_the_head_and_a_checkpoint(tmp_path: Path) -> None:
    learn, held_out = wanderings(bigrams()[0], 60, 16)
    trainer, kept, path = trainer_of(epochs=10**6), [], tmp_path / "checkpoint.safetensors"
    trainer.train(
        learn,
        held_out,
        report=lambda standing: None,
        evaluated=lambda standing, state: kept.append((standing.update, state is not None)),
        checkpoint=path,
        is_enough=lambda: trainer.standing.update == 3,
    )
    assert kept == [(3, True)]
    again = trainer_of(epochs=1)
    again.load(path)
    assert again.standing.update == 3


def test_compiling_is_in_the_budget_and_not_in_the_schedule() -> None:
    trainer = trainer_of(epochs=10**6, budget_s=100)
    trainer.standing = TrainingState(update=1, num_updates=10**6, spent_s=40, compiling_s=40)
    assert trainer._done() < 0.001
    trainer.standing.spent_s = 70
    assert trainer._done() == pytest.approx(0.5)


def test_a_head_that_was_kept_is_judged_again_on_other_rows() -> None:
    trainer = trainer_of(epochs=1)
    learn, held_out = wanderings(bigrams()[0], 60, 16)
    before = {name: tensor.clone() for name, tensor in trainer.head.state().items()}
    trainer.evaluate_kept({name: torch.zeros_like(tensor) for name, tensor in before.items()}, held_out)
    assert trainer.standing.best_on == held_out.key != learn.key
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.head.state().items())
    best = trainer.standing.best
    trainer.evaluate_kept(before, held_out)  # the same rows: nothing new
    assert trainer.standing.best == best


def test_a_head_that_could_not_be_kept_is_not_the_best() -> None:
    trainer = trainer_of(epochs=1)
    learn, held_out = wanderings(bigrams()[0], 60, 16)

    def evaluated(standing: TrainingState, state: dict[str, Tensor] | None) -> None:
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        trainer.train(learn, held_out, report=lambda standing: None, evaluated=evaluated)
    assert trainer.standing.best == () and trainer.standing.best_on == ""


def test_sizes_are_those_of_a_start() -> None:
    model, head = started("llama")
    assert weight_sizes(shape_of(model)) == {name: tuple(each.shape) for name, each in head.state().items()}


def test_a_head_of_other_sizes_is_refused_before_anything_is_answered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").mkdir()
    model, prompts = write_model(tmp_path / "model"), tmp_path / "prompts"
    prompts.write_text("one\ntwo\n")
    target, head = started("llama")
    write_head(tmp_path / "head", head.state(), shape_of(target), IDS)
    words = ["--model", str(model), "--prompts", str(prompts), "--from-head", str(tmp_path / "head")]
    assert main(["train-draft", *words, "--out", str(tmp_path / "out")]) == 2
    assert "--from-head: fc.weight must be" in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("answers/*"))


def test_another_vocabulary_keeps_the_rows_that_both_have_and_maps_the_targets_for_new_ones(tmp_path: Path) -> None:
    state, (model, head) = tiny("llama").reference.state_dict(), started("llama")
    turn, theirs = torch.linalg.qr(torch.randn(model.config.hidden_size, model.config.hidden_size))[0], state
    head.load({**head.state(), "lm_head.weight": theirs["lm_head.weight"][IDS] @ turn})
    write_head(tmp_path, head.state(), head.shape, IDS)
    given, wanted = read_head(tmp_path), torch.arange(1, VOCAB, 3)
    found = with_vocabulary(given, state, model.config, wanted)["lm_head.weight"]
    is_known = torch.isin(wanted, IDS)
    assert torch.equal(found[is_known], given.weights["lm_head.weight"].float()[torch.isin(IDS, wanted)])
    expected = theirs["lm_head.weight"][wanted[~is_known]] @ turn
    torch.testing.assert_close(found[~is_known], expected, rtol=0.1, atol=0.02)  # what was stored is bf16


def test_an_lm_head_of_whole_numbers_stands_for_floats_and_a_broken_one_is_refused(tmp_path: Path) -> None:
    model, head = started("llama")
    write_head(tmp_path, head.state(), head.shape, IDS, "int8")
    floats, whole = read_head(tmp_path).weights["lm_head.weight"], head.state()["lm_head.weight"]
    assert (floats - whole).abs().max() <= whole.abs().max() / 254 * 1.01
    served = load_head(tmp_path, "eagle3", model, layer_ids=None, weights="fp32", device=CPU)
    hidden = torch.randn(3, model.config.hidden_size)
    assert isinstance(served, Eagle3)
    normed = rms_norm(hidden, hidden.shape[-1:], head.state()["norm.weight"], model.config.norm_eps)
    torch.testing.assert_close(served.logits(hidden), normed @ floats.t(), rtol=1e-4, atol=1e-4)
    config = json.loads((tmp_path / "config.json").read_text())
    for changed, said in (
        ({"quantization_config": {**config["quantization_config"], "format": "other"}}, "quantization_config"),
        ({"quantization_config": None}, "torch.int8"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, **changed}))
        with pytest.raises(ConfigError, match=said):
            load_head(tmp_path, "eagle3", model, layer_ids=None, weights="fp32", device=CPU)
    write_head(tmp_path, head.state(), head.shape, IDS)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"there is no lm_head\.weight_scale"):
        load_head(tmp_path, "eagle3", model, layer_ids=None, weights="fp32", device=CPU)


def test_the_learning_rate_rises_and_falls() -> None:
    shares = [schedule(done / 100, 0.05) for done in range(101)]
    assert max(shares) == shares[5] == 1.0
    assert shares[:6] == sorted(shares[:6]) and shares[5:] == sorted(shares[5:], reverse=True)
    assert 0 < shares[0] < 0.1 and 0 < shares[-1] < 0.1


def test_the_command_answers_trains_goes_on_and_its_head_speculates(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    folder, out = write_model(tmp_path / "model"), tmp_path / "out"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(f'{{"p": "question {number}"}}' for number in range(12)) + "\n")
    small = ["--row-tokens", "64", "--batch-rows", "2", "--unrolled-steps", "2", "--threads", "1"]
    words = ["train-draft", "--model", str(folder), "--out", str(out), *small]
    more = ["--prompts", str(prompts), "--answer-tokens", "20", "--at-once", "4"]
    own = ["--draft-vocabulary", "32", "--feed-size", "100"]
    assert main([*words, *more, *own, "--epochs", "1"]) == 0
    shards, first = sorted((out / "answers").iterdir()), (out / "log.jsonl").read_text()
    assert main([*words, *more, *own, "--epochs", "2"]) == 0
    assert sorted((out / "answers").iterdir()) == shards  # nothing is answered again
    assert (out / "log.jsonl").read_text().startswith(first) and (out / "checkpoint.safetensors").exists()
    begun = ["--epochs", "1", "--from-head", str(out / "head")]
    again = [*words, "--out", str(tmp_path / "again"), *more, "--loss", "coupled", *begun]
    assert main(again) == 0  # the last --out counts
    assert (
        json.loads((tmp_path / "again" / "vocabulary.json").read_text())["ids"]
        == (json.loads((out / "vocabulary.json").read_text())["ids"])
    )
    assert main(again) == 0  # goes on
    assert main(again[:-2]) == 2  # what lies there was begun from a head
    assert main([*again, "--feed-size", "99"]) == 2  # the head has one
    assert main([*again, "--draft-vocabulary", "31"]) == 2  # another folder's
    wider = [*words, "--out", str(tmp_path / "wider"), *more, "--draft-vocabulary", "48", "--lm-head", "int8", *begun]
    assert main(wider) == 0 == main(wider)  # goes on
    kept = load_file(tmp_path / "wider" / "head" / "model.safetensors")
    assert len(kept["d2t"]) == 48 and kept["lm_head.weight"].dtype == torch.int8
    options, model = Options(max_new_tokens=24, temperature=0), ModelConfig(weights="fp32")
    sched, memory = SchedConfig(context=128), MemoryConfig(pool_tokens=512)
    texts = set()
    for head in (out / "head", tmp_path / "wider" / "head"):
        spec = SpecConfig(spec="auto", draft=str(head))
        with LLM(str(folder), EngineConfig(model=model, sched=sched, memory=memory, spec=spec)) as llm:
            texts.add(llm.generate("question 3", options).text)
            assert llm.stats().spec.rounds > 0
    with LLM(str(folder), EngineConfig(model=model, sched=sched, memory=memory)) as llm:
        assert {llm.generate("question 3", options).text} == texts


def test_processes_share_the_conversations_and_any_number_of_them_goes_on(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    folder, out = write_model(tmp_path / "model"), tmp_path / "out"
    talks = [["one"], ["two", "again"], ["three"], ["four", "more", "most"]]
    job = Job(folder=out, model=str(folder), device="cpu", num_new=6, at_once=4, row_len=256, processes=2, composed=3)
    out.mkdir()
    make_answers(job, talks, lambda done, total: None)
    names = sorted(path.name for path in (out / "answers").iterdir())
    assert names == ["answers-p0-0000.safetensors", "answers-p1-0000.safetensors"]
    answers = kept_answers(job)
    drawn = [each for each in answers if each.temperature]
    assert {each.temperature for each in drawn} <= set(TEMPERATURES) and 2 * len(drawn) == len(answers) >= 14
    seen: list[int] = []
    make_answers(replace(job, processes=1), talks, lambda done, total: seen.append(done))
    assert not seen and kept_answers(job) == answers  # nothing is left to answer
    make_answers(replace(job, processes=1), [*talks, ["five"]], lambda done, total: seen.append(done))
    assert len(kept_answers(job)) == len(answers) + 2


def test_parts_of_a_batch_add_up_to_its_gradient() -> None:
    learn, held_out = wanderings(bigrams()[0], 60, 16)
    found = []
    for micro_rows in (None, 4):
        trainer = trainer_of(epochs=1, micro_rows=micro_rows)
        trainer.train(
            learn,
            held_out,
            report=lambda standing: None,
            evaluated=lambda standing, state: None,
            is_enough=lambda trainer=trainer: trainer.standing.update == 1,
        )
        found.append(torch.cat([weight.grad.flatten() for weight in trainer.head.parameters()]))
    assert torch.cosine_similarity(*found, dim=0) > 0.99  # parts weigh the same, whatever counts in each
    assert 0.9 < found[0].norm() / found[1].norm() < 1.1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--epochs", "0"], "--epochs must be at least 1, got 0"),
        (["--train-s", "0"], "--train-s must be above 0, got 0.0"),
        (["--prompts", "nowhere.jsonl"], "--prompts: there is no file nowhere.jsonl"),
        (["--threads", "0"], "--threads must be in [1, 1024], got 0"),
        (["--processes", "0"], "--processes must be at least 1, got 0"),
        (["--composed", "-1"], "--composed must be at least 0, got -1"),
        (["--batch-rows", "4", "--micro-rows", "3"], "--micro-rows must divide --batch-rows 4, got 3"),
    ],
)
def test_what_cannot_work_is_refused(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train-draft", *words]) == 2
    assert message in capsys.readouterr().err


def test_what_does_not_fit_the_folder_or_the_model_is_refused_before_anything_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    write_model(tmp_path / "model")

    def refused(*words: str) -> str:
        assert main(["train-draft", "--model", "model", *words]) == 2
        return capsys.readouterr().err

    assert "--out draft-head: there are no answers to learn from; give --prompts or --own-questions" in refused()
    made = "what lies in --out draft-head was made with"
    assert f"--draft-vocabulary: {made}" in refused("--draft-vocabulary", "40")
    assert f"--batch-rows: {made} 32, got 3; use another folder" in refused("--batch-rows", "3")
    assert f"--unrolled-steps: {made} 7, got 2" in refused("--unrolled-steps", "2")
    write_model(tmp_path / "model", seed=1)
    assert f"--model: {made} weights whose key is " in refused()
    assert "--answer-tokens must be below the model's context, 8192, got 8192" in refused("--answer-tokens", "8192")
    (tmp_path / "prompts").write_text("only one\n")
    one = ["--prompts", "prompts", "--answer-tokens", "4", "--out"]
    assert "of 2 answers none is left to learn from" in refused(*one, "one")
    assert "--row-tokens 16: every prompt has 16 tokens or more" in refused(*one, "short", "--row-tokens", "16")
    (tmp_path / "file").write_text("")
    assert "--out file: is no folder" in refused("--out", "file")
    (tmp_path / "one" / "job.json").write_text("")
    assert "--out one: job.json cannot be read" in refused("--out", "one")
    assert "--feed-size must be at least the model's, " in refused("--feed-size", "3")
    assert "--row-tokens must be at most the model's context, 8192, got 9000" in refused("--row-tokens", "9000")
    (tmp_path / "bad.gz").write_bytes(b"no")
    assert "--prompts: bad.gz cannot be read" in refused("--prompts", "bad.gz")


def test_a_line_of_a_file_ends_where_its_json_does(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"p": "one\u2028line"}\n{"turns": ["two", "three"], "prompt": "not this"}\nfour\n', encoding="utf-8"
    )
    assert read_turns(path) == [["one\u2028line"], ["two", "three"], ["four"]]
