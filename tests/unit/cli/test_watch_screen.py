"""The picture of a server: what it says, and that it fits."""

from typing import Any

import pytest

from roost.cli.watch_screen import picture
from roost.cli.watched_server import LiveState
from tests.support.watched_frames import TOTALS, pool, row, session, step, whole


def drawn(*frames: Any, width: int = 100, height: int | None = None, note: str = "") -> list[str]:
    server = LiveState()
    for frame in frames:
        server.merge(frame)
    lines = picture(server, server.now_ms, url="http://here", note=note, width=width, height=height)
    return [line.plain.rstrip() for line in lines]


def line_of(lines: list[str], start: str) -> str:
    (line,) = [line for line in lines if line.lstrip().startswith(start)]
    return line


def test_the_head_says_how_the_server_is() -> None:
    lines = drawn(whole(totals={**TOTALS, "failed_steps": 2, "retractions": 3}))
    assert lines[0] == "roost 0.1  tiny-model  ok  http://here"
    assert lines[1].startswith("1.4 tok/s out  20.0 tok/s in  0.4 steps/s  1 running  1 queued")
    assert "2 failed" in lines[2] and "3 retractions" in lines[2]
    assert lines[3] == "ended: stop 1, length 2  refused: 429 1"


def test_before_anything_is_known_only_the_health_is_said() -> None:
    assert drawn({"whole": False, "health": "loading"}) == ["roost  loading  http://here"]
    assert (
        "ok" not in drawn(whole(), note="lost for 3 s")[0] and "lost for 3 s" in drawn(whole(), note="lost for 3 s")[0]
    )


def test_every_page_has_a_character_of_its_kind() -> None:
    lines = drawn(whole())
    assert "█" * 8 + "▓" * 5 + "·" * 50 in lines
    assert "63 full pages of 16  · free 50  █ leased 8  ▓ cached 5  ▒ retiring 0" in lines
    assert "held most: session walk (idle) 8; cached prefix, 64 tokens 5" in lines


def test_where_pages_are_many_a_character_is_the_commonest_kind_of_some() -> None:
    runs = [[1, 1000, 1, "L1"], [1001, 9000, 0, ""]]
    lines = drawn(whole(pools=[pool(total=10_000, runs=runs)]), width=50)
    cells = "".join(line for line in lines if line and set(line) <= {"█", "·"})
    assert "a character: 50 pages" in line_of(lines, "10,000 full pages")
    assert cells == "█" * 20 + "·" * 180


def test_a_kind_that_is_not_known_here_has_a_character_too() -> None:
    lines = drawn(whole(kinds=["free", "offloaded"], pools=[pool(runs=[[1, 60, 1, ""], [61, 2, 0, ""]])]))
    assert "▚" * 60 + "··" in lines and "▚ offloaded 60" in line_of(lines, "63 full pages")


def test_states_are_not_called_pages() -> None:
    assert line_of(drawn(whole(pools=[pool(book="states")])), "63 states").startswith("63 states  ")


def test_a_session_shows_what_is_resident_and_where_turns_end() -> None:
    lines = drawn(whole(), width=80)
    assert line_of(lines, "walk") == "  walk             idle 1.2 s ━━━━━━┿━━━━━━━━━╌╌╌╌ 96/120 tokens, 2 turns"
    assert line_of(lines, "└ copy") == "  └ copy           running    ━━━━━━┿━━━━━━━━      90/90 tokens, 2 turns"
    assert line_of(lines, "other") == "  other            idle 1 min ╌╌                   0/10 tokens, 1 turns"


def test_a_fork_of_a_session_that_is_closed_names_it() -> None:
    assert line_of(drawn(whole(sessions=[session("copy", parent="gone")])), "copy").endswith("forked from gone")


def test_a_row_shows_its_prompt_and_then_its_output() -> None:
    rows = [
        row("a", phase="prefill", done=50, cached=0, accept=0.0, session=None),
        row("b", output=128),
        row("c", max=None),
    ]
    lines = drawn(whole(rows=rows), width=80)
    assert line_of(lines, "a ") == "  a                prefill    ██████████░░░░░░░░░░ 50/100 of the prompt"
    decoding = "128/256 after 100, 64 cached, accept length 2.40, session copy"
    assert line_of(lines, "b ") == f"  b                decode     ██████████░░░░░░░░░░ {decoding}"
    assert " 7 after 100" in line_of(lines, "c ")


def test_the_queue_says_why_each_waits_and_how_many_are_not_told_of() -> None:
    lines = drawn(whole(queue=[{"id": "q", "session": "walk", "waits": ""}], totals={**TOTALS, "queued": 300}))
    assert "queued 300  (the first 1 of them)" in lines
    assert line_of(lines, "q ") == "  q                waits its turn  session walk"
    assert line_of(drawn(whole()), "77aa…").endswith(" 12 pages are not free")


def test_steps_are_bars_the_failed_ones_crosses_and_one_slow_one_flattens_none() -> None:
    steps = [step(1, 0.0, failed=True), *([2, 0, 0.5, 4, 0, 1, 0, 0, 1, False] for _ in range(40)), step(100, 0.0)]
    lines = drawn(whole(steps=steps))
    assert line_of(lines, "device").split() == ["device", "4.00", "800.00", "ms", "✗" + "█" * 41]
    assert line_of(lines, "last 42 steps")


def test_more_steps_than_fit_are_grouped_and_the_highest_of_each_group_counts() -> None:
    slow = [1, 0, 0, 8, 0, 1, 0, 0, 1, False]
    fast = [1, 0, 0, 1, 0, 1, 0, 0, 1, False]
    lines = drawn(whole(steps=[fast, slow] * 256), width=60, height=60)
    (bars,) = line_of(lines, "device").split()[-1:]
    assert set(bars) == {"█"} and len(bars) <= 60


def test_drafts_show_acceptance_by_place_costs_and_the_last_tree() -> None:
    lines = drawn(whole())
    assert line_of(lines, "drafts").startswith("drafts  accept length 2.50 in 10 rounds")
    assert line_of(lines, "accepted by place").split()[3:] == ["1:▇80%", "2:▅50%", "3:▂20%"]
    assert line_of(lines, "learned costs").endswith("1: 2.00 ms  4: 2.50 ms")
    assert line_of(lines, "tree of") == "  tree of 3f2a…  ● ─ ●○ ─ ●"


def test_acceptance_is_that_of_the_rounds_with_a_draft_at_the_place() -> None:
    spec = {"rounds": 4, "offered": 6, "accepted": 4, "histogram": [1, 2, 1, 0], "lengths": [0, 2, 2, 0]}
    lines = drawn(whole(spec={**spec, "chosen": 2, "costs": []}))
    assert line_of(lines, "accepted by place").split()[3:] == ["1:▇75%", "2:▅50%"]


@pytest.mark.parametrize("changed", [{"spec": None, "tree": None}, {"spec": {"rounds": 0}, "tree": None}])
def test_without_drafts_nothing_is_said_of_them(changed: dict[str, Any]) -> None:
    assert not [line for line in drawn(whole(**changed)) if "draft" in line or "tree" in line]


@pytest.mark.parametrize("width", [20, 36, 80, 200])
@pytest.mark.parametrize("height", [24, 36, 50, 100])
def test_the_picture_fits_and_says_what_does_not(width: int, height: int) -> None:
    sessions = [session(f"session-{number}", length=number) for number in range(200)]
    queue = [{"id": f"q{number}", "session": None, "waits": "its turn"} for number in range(100)]
    lines = drawn(whole(sessions=sessions, queue=queue, rows=[row("only")]), width=width, height=height)
    assert len(lines) == height and max(map(len, lines)) <= width
    assert sum(line.startswith("  … ") for line in lines) == 2
    assert any(line.startswith("  only") for line in lines)


def test_where_the_height_is_short_each_list_has_three_lines() -> None:
    sessions = [session(f"s{number}") for number in range(4)]
    rows = [row(f"r{number}") for number in range(3)]
    lines = drawn(whole(sessions=sessions, rows=rows, queue=[]), height=1)
    assert [line.split()[0] for line in lines if line[2:4] in ("s0", "s1", "s2", "r0", "r1", "r2")] == [
        *("s0", "s1"),
        *("r0", "r1", "r2"),
    ]
    assert "  … 2 more" in lines


def test_where_the_height_is_short_times_and_drafts_give_way_to_rows_and_the_queue() -> None:
    low, high = drawn(whole(), height=24), drawn(whole(), height=60)
    assert len(low) == 24 and line_of(low, "device") and line_of(low, "77aa…")
    assert not [line for line in low if "tree of" in line or line.startswith("  width")]
    assert line_of(high, "tree of") and line_of(high, "width") and line_of(high, "held most")


def test_deep_forks_are_not_indented_out_of_sight() -> None:
    names = [session(str(number), parent=str(number - 1) if number else None, length=1) for number in range(9)]
    lines = [line for line in drawn(whole(sessions=names, rows=[], steps=[])) if "0/1 tokens" in line]
    indents = [line.index("└") for line in lines[1:]]
    assert indents == [2, 4, 6, 8, 10, 12, 12, 12]


def test_of_many_places_the_first_are_shown() -> None:
    for num_places in (8, 9):
        spec = {"rounds": 10, "offered": 90, "accepted": 90, "histogram": [0] * num_places + [10], "lengths": []}
        line = line_of(drawn(whole(spec=spec)), "accepted by place")
        assert "8:█100%" in line and "9:" not in line


def test_without_a_height_everything_is_there() -> None:
    sessions = [session(f"session-{number}") for number in range(200)]
    assert sum(line.startswith("  session-") for line in drawn(whole(sessions=sessions))) == 200


def test_characters_of_double_width_do_not_move_what_follows() -> None:
    server = LiveState()
    server.merge(whole(sessions=[session("会" * 30, length=5), session("a", length=5)]))
    lines = picture(server, server.now_ms, url="", width=80, height=60)
    wide, plain = (line for line in lines if "0/5 tokens" in line.plain)
    assert wide.cell_len == plain.cell_len
