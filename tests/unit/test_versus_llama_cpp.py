"""The comparison with llama.cpp: what it starts, and what it makes of what it measured. No engine is started here."""

from pathlib import Path
from typing import Any

import pytest

from bench import llama_cpp
from bench.versus_llama_cpp import PARTS, Engine, Shape, Texts, engines_of, parse, rows_of

SHAPE = Shape(slots=8, context=512)


def _engines(*flags: str) -> list[Engine]:
    return list(engines_of(parse(flags), lambda shape: ["llama", str(shape.slots)]))


def _measured(*tokens_s: float) -> dict[str, Any]:
    memory = {"resident": 1.0, "proportional": 1.0}
    return {"rounds": [{"tokens_s": each, "late_over_early": each} for each in tokens_s], "memory_mb": memory}


def _two_trees(folder: Path) -> list[str]:
    for name in ("before", "after"):
        (folder / name / "src" / "roost").mkdir(parents=True)
    return [part for name in ("before", "after") for part in ("--tree", str(folder / name))]


def test_a_ratio_is_the_median_of_the_ratios_within_a_round() -> None:
    found = {"one": {"llama.cpp": _measured(10, 100, 50), "Roost plain": _measured(20, 110, 75)}}
    rival, plain = rows_of(found, _engines())
    assert (rival["median"], rival["over"], rival["reached"]) == (50, {}, None)
    assert (plain["median"], plain["over"], plain["aim"], plain["reached"]) == (75, {"llama_cpp": 1.5}, 1.2, True)


def test_checkouts_are_held_against_the_first_in_the_same_setting(tmp_path: Path) -> None:
    engines = _engines("--engines", "plain,head", *_two_trees(tmp_path))
    found = {"one": {engine.name: _measured(speed) for engine, speed in zip(engines, (10, 20, 15, 50), strict=True)}}
    assert [row["over"] for row in rows_of(found, engines)] == [{}, {}, {"first": 1.5}, {"first": 2.5}]
    assert {row["reached"] for row in rows_of(found, engines)} == {None}


def test_less_is_better_where_the_figure_is_a_time_or_what_an_aim_limits() -> None:
    found = {"sessions": {"Roost plain": _measured(1.9), "Roost head": _measured(5.3)}}
    assert [row["reached"] for row in rows_of(found, _engines())] == [True, False]
    seconds = {"llama.cpp": _measured(), "Roost head": _measured()}
    seconds["llama.cpp"]["rounds"] = [{"cold_s": 1.0, "warm_s": 1.0}]
    seconds["Roost head"]["rounds"] = [{"cold_s": 4.0, "warm_s": 2.0}]
    over = [row["over"].get("llama_cpp") for row in rows_of({"start": seconds}, _engines())]
    assert over == [None, 0.25, None, 0.5]


def test_every_engine_has_the_same_threads_and_roost_its_further_flags_last() -> None:
    rival, plain, head = _engines("--threads", "3", "--roost-args", "--backend torch")
    assert rival.command(SHAPE) == ["llama", "8"]
    assert plain.command(SHAPE)[-6:] == ["--threads", "3", "--spec", "none", "--backend", "torch"]
    assert head.command(SHAPE)[-4:] == ["--threads", "3", "--backend", "torch"]
    command = llama_cpp.command(Path("scratch"), Path("model.gguf"), threads=3, slots=8, context=512)
    assert command[2:] == ["model.gguf", "--threads", "3", "--slots", "8", "--context", "512"]


def test_checkouts_and_flags_beside_each_other_have_names_of_their_own(tmp_path: Path) -> None:
    engines = _engines(
        "--engines", "head", *_two_trees(tmp_path), "--roost-args", "", "--roost-args=--kv-cache-dtype int8"
    )
    assert [engine.name for engine in engines] == [
        "Roost head (before)",
        "Roost head --kv-cache-dtype int8 (before)",
        "Roost head (after)",
        "Roost head --kv-cache-dtype int8 (after)",
    ]
    assert engines[0].environment == {"PYTHONPATH": str(tmp_path / "before" / "src")}


def test_engines_that_would_have_the_same_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="must differ"):
        _engines(*_two_trees(tmp_path), "--tree", str(tmp_path / "after"))


def test_no_question_is_asked_twice() -> None:
    texts = Texts(["a", "b", "c"])
    asked = [text for part in PARTS for number in range(3) for text in texts.some(32, part, number)]
    assert len(set(asked)) == len(asked)
    assert texts.some(4, "one", 1) == texts.some(4, "one", 1)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--parts", "one,nine"), "must be some of one,four,"),
        (("--engines", ""), "must be some of llama.cpp,plain,head"),
        (("--rounds", "0"), "must be a number from 1"),
        (("--again", "-1"), "--again"),
        (("--turns", "20"), "must be a number from 21"),
        (("--prompts", "/nowhere"), "argument --prompts: there is no file /nowhere"),
        (("--tree", "/nowhere"), "must be a checkout of Roost"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    flags: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(flags)
    assert said in capsys.readouterr().err
