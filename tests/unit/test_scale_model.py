"""The scale model: parts of ranks, messages, work, fitted costs. Small cases are worked out by hand."""

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.gpu_shapes import SHAPES, RandomState
from bench.scale_costs import (
    KINDS,
    MEASURED_LEN,
    NUMBERS,
    Pass,
    Row,
    Work,
    fit,
    left_out,
    measured_rows,
    rows_of,
    work_of,
)
from bench.scale_model import Links, Question, held_against, messages_s, parse, predicted
from bench.scale_shapes import LARGE, memory_left, num_weights, rank_part, session_bytes, weight_bytes
from roost.errors import ConfigError
from roost.models.decoder import Decoder
from roost.runner.memory import state_bytes, token_bytes

SLOW = Links(link_gbps=100, link_latency_us=10, network_gbps=20, network_latency_us=30)
RING = Links()
NO_LATENCY = Links(link_gbps=1, link_latency_us=0, network_gbps=1, network_latency_us=0)
COSTS = fit(measured_rows())


def _asked(links: Links = SLOW, **others: Any) -> Question:
    known = {"weights": "bf16", "context": 2048, "accept_length": 2.5, "num_steps": 3, "prompt": 4096}
    known |= {"contexts": (8192,), "gpu_bytes": 140 * 2**30}
    return Question(costs=COSTS, links=links, **(known | others))


def test_a_message_takes_its_latency_and_its_bytes_over_every_link_that_it_crosses() -> None:
    assert SLOW.all_reduce_s(1e6, 1) == SLOW.all_gather_s(1e6, 1) == 0
    assert SLOW.all_reduce_s(1e6, 4) == pytest.approx(10e-6 + 1.5 * 1e6 / 100e9)
    assert SLOW.all_gather_s(1e6, 4) == pytest.approx(10e-6 + 0.75 * 1e6 / 100e9)
    between = 30e-6 + 2 * (1 / 2) * (1e6 / 8) / 20e9  # two nodes: each GPU has an eighth to sum with its fellow
    assert SLOW.all_reduce_s(1e6, 16) == pytest.approx(10e-6 + 1.75 * 1e6 / 100e9 + between)


def test_a_pass_sends_the_embedding_two_sums_a_layer_and_the_logits() -> None:
    tiny = SHAPES["tiny"]  # 3 layers of 96, 512 tokens
    hidden, logits = 5 * 96 * 2, 2 * 512 * 2  # bytes of 5 tokens, and of the logits of 2
    assert messages_s(tiny, NO_LATENCY, 2, 5, 2) == pytest.approx((7 * hidden * 2 * (1 / 2) + logits / 2) / 1e9)
    latency_alone = Links(link_gbps=1e30, link_latency_us=1)
    assert messages_s(tiny, latency_alone, 2, 5, 2) == pytest.approx(8e-6)


@pytest.mark.parametrize("name", LARGE)
def test_the_parts_of_all_ranks_are_the_model_and_what_is_copied(name: str) -> None:
    whole = LARGE[name]
    sizes = [weight_bytes(rank_part(whole, ranks), "bf16") for ranks in (1, 2, 4, 8)]
    assert sizes[0] == 2 * num_weights(whole)
    for ranks, size in zip((2, 4, 8), sizes[1:], strict=True):
        assert sizes[0] / ranks <= size <= 1.05 * sizes[0] / ranks  # routers, norms, KV heads
    held = [session_bytes(rank_part(whole, ranks), 8192, "auto") for ranks in (1, 2, 4, 8, 16)]
    assert all(later <= earlier for earlier, later in pairwise(held))


def test_sizes_are_those_that_the_models_names_say() -> None:
    sizes = {name: round(num_weights(config) / 1e9) for name, config in LARGE.items()}
    assert sizes == dict(zip(LARGE, (71, 406, 117, 235, 396), strict=True))  # text alone: images and MTP are not there
    assert round(num_weights(LARGE["qwen3-235b-a22b"], is_active=True) / 1e9) == 22


def test_sessions_stop_growing_where_kv_heads_are_copied() -> None:
    llama = LARGE["llama-70b"]  # 8 KV heads
    a_token = 80 * 2 * 128 * 2
    assert [session_bytes(rank_part(llama, n), 1, "auto") // a_token for n in (1, 2, 4, 8, 16)] == [8, 4, 2, 1, 1]
    left = [memory_left(rank_part(llama, n), llama.vocab_size, "bf16", 140 * 2**30) for n in (1, 8, 16)]
    assert left[0] == 0 < left[1] < left[2] < 140 * 2**30
    with pytest.raises(ConfigError, match=r"--gpus: 3 ranks do not divide the model's 64 heads"):
        rank_part(llama, 3)


@pytest.mark.parametrize("name", ["tiny", "tiny-gpt-oss", "tiny-qwen3.5"])
@pytest.mark.parametrize("kept", ["auto", "fp8"])
def test_a_token_of_a_session_takes_the_bytes_that_the_engine_counts(name: str, kept: str) -> None:
    meta = torch.device("meta")
    model = Decoder(SHAPES[name], RandomState(SHAPES[name], meta), "bf16", meta)
    full, window = token_bytes(model, None, kept)
    took = [session_bytes(SHAPES[name], length, kept) for length in (0, 1, 24, 25)]
    assert took[1] - took[0] == full + window
    assert took[3] - took[2] == full
    assert (took[0] > 0) == (state_bytes(model) > 0)


def test_a_plain_step_reads_what_there_is_and_many_tokens_compute() -> None:
    tiny = SHAPES["tiny"]
    numbers = num_weights(tiny, is_active=True)
    one, few, many = (work_of(tiny, "bf16", Pass(batch=n, row_tokens=1, seen=10)) for n in (1, 4, 500))
    assert one[NUMBERS["bf16 weights read for 1 token"]] == few[NUMBERS["bf16 weights read for several"]] == 2 * numbers
    assert many[NUMBERS["operations of products"]] == 2 * 500 * numbers
    assert few[NUMBERS["KV read"]] == 4 * 10 * session_bytes(tiny, 1, "auto")
    assert one[NUMBERS["layers of 1 token"]] == few[NUMBERS["layers of several"]] == 3


def test_a_mixture_reads_no_expert_twice_and_none_that_nobody_goes_to() -> None:
    mixture = SHAPES["30b-a3b"]
    names = ("experts read pair by pair", "experts read, pairs sorted")
    one = 48 * 3 * 2048 * 768 * 2  # bytes of one expert in every layer
    read = [
        sum(work_of(mixture, "bf16", Pass(batch=n, row_tokens=1, seen=0))[NUMBERS[name]] for name in names) / one
        for n in (1, 2, 8, 64)
    ]
    assert read[0] == pytest.approx(8)
    assert read[1] == pytest.approx(16 - 8 * 8 / 128)
    assert read[2] < read[3] < 128


def test_costs_that_made_the_times_are_found_and_none_is_below_zero() -> None:
    chance = np.random.default_rng(5)
    costs = chance.uniform(0, 2, len(KINDS))
    costs[3] = 0

    def row(number: int, work: Work) -> Row:
        return Row(shape=str(number % 4), form="bf16", what="", seconds=float(costs @ work), work=work)

    rows = [row(number, chance.uniform(1, 9, len(KINDS))) for number in range(40)]
    assert fit(rows) == pytest.approx(costs, abs=1e-9)
    assert left_out(rows) == pytest.approx([row.seconds for row in rows])
    slower = [replace(row, seconds=row.seconds * (1 + number % 3)) for number, row in enumerate(rows)]
    assert fit(slower).min() >= 0
    alone = [replace(rows[0], work=np.eye(len(KINDS))[0], seconds=1.0), *(replace(row, shape="0") for row in rows[:1])]
    assert left_out(alone) == [None, None]


def test_what_was_measured_is_predicted_to_some_percent_by_costs_that_a_device_could_have() -> None:
    rows = measured_rows()
    errors = [abs(row["error"]) for row in held_against(rows, COSTS, left_out(rows))]
    assert len(errors) >= 40
    assert float(np.median(errors)) < 0.06
    assert max(errors) < 0.3
    for (kind, unit), cost in zip(KINDS, COSTS, strict=True):
        most = {"TB/s": 4.8e12, "TFLOP/s": 989e12, "us": math.inf}[unit]
        assert cost > 0, kind
        assert 1 / cost < most, kind


@pytest.mark.parametrize("name", ["llama-70b", "gpt-oss-120b", "qwen3-235b-a22b"])
def test_more_gpus_of_a_node_are_faster_and_hold_more_and_slower_links_slow_all_down(name: str) -> None:
    rows = [predicted(name, LARGE[name], ranks, _asked(RING)) for ranks in (4, 8)]
    slow = predicted(name, LARGE[name], 8, _asked(replace(RING, link_latency_us=20)))
    for before, after, slower in zip(*(row["batches"] for row in (*rows, slow)), strict=True):
        assert after["ms"] < before["ms"]
        assert after["ms_links"] >= before["ms_links"]
        assert slower["ms"] > after["ms"]
    for row in rows:
        assert [each["ms"] for each in row["batches"]] == sorted(each["ms"] for each in row["batches"])
    assert rows[0]["sessions"]["auto"][8192] < rows[1]["sessions"]["auto"][8192] < rows[1]["sessions"]["fp8"][8192]
    assert rows[0]["prefill_tokens_s"] < rows[1]["prefill_tokens_s"]
    long = predicted(name, LARGE[name], 8, _asked(RING, context=8192))
    assert long["batches"][1]["ms"] > rows[1]["batches"][1]["ms"]


def test_what_cannot_be_is_said_with_its_reason() -> None:
    assert "no room" in predicted("llama-405b", LARGE["llama-405b"], 2, _asked())["refused"]
    assert "bf16 alone" in predicted("", LARGE["gpt-oss-120b"], 8, _asked(weights="fp8"))["refused"]
    assert "do not divide" in predicted("", LARGE["llama-70b"], 6, _asked())["refused"]
    few = predicted("", LARGE["llama-70b"], 2, _asked(context=16384))  # KV of 22 requests fits
    assert [each["batch"] for each in few["batches"]] == [1, 8]


@pytest.mark.parametrize("flag", ["--gpus", "--link-gbps", "--gpu-gib", "--accept-length", "--contexts"])
def test_numbers_that_cannot_be_are_refused_by_their_flag(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse([flag, "0"])
    assert f"{flag} must be above 0, got" in capsys.readouterr().err


def test_a_rank_s_part_is_held_against_what_a_table_measured(tmp_path: Path) -> None:
    cell = {"shape": "llama-70b-of-8", "case": "plain", "batch": 8, "depth": 1, "page_size": 64, "graphs": True}
    table = tmp_path / "gpu_table.json"
    table.write_text(json.dumps({"weights": "bf16", "cells": [{**cell, "ms_per_token": 6.0, "accept_length": 0.0}]}))
    (row,) = rows_of(*parse(["--also", str(table)]).also)
    said = predicted("", LARGE["llama-70b"], 8, _asked(context=MEASURED_LEN))["batches"][1]
    assert 1e3 * float(COSTS @ row.work) == pytest.approx(said["ms"] - said["ms_links"])
