"""Programs: lists of records that the team of threads runs together, one record after the other.

A record is cut into pieces, and a member takes one after the other, whoever is there: one that the operating system has
stopped holds nobody up unless it is in the middle of a piece. `CLAIM` says where the team is: the program's number,
the record and the next piece, in one word that members change by compare-and-swap; so whoever comes late, or wakes in
the middle of a later program, finds its place or learns that there is none. Who finishes the last piece of a record
goes on to the next. A member that waits looks at that word for a while, and then lets others have the core between its
looks. Compiled once, with every kernel in it. Called by `numba_kernels.team`.
"""

import numba
import numpy as np
from numba import njit, types

from roost.numba_kernels import attention, attention_plan, best_output, embedding, gated_delta, linear, rotary, rows
from roost.numba_kernels.records import RECORD_BYTES, field
from roost.numba_kernels.simd import (
    atomic_add,
    atomic_change,
    atomic_load,
    atomic_store,
    atomic_swap,
    relax,
)
from roost.numba_kernels.support import compiled_folder

numba.config.CACHE_DIR = str(compiled_folder())  # before anything below is made

# The control block: a cache line each. PARKED: one for each member, behind the others.
CLAIM, RECORD, NUM_PIECES, DONE, PROGRAM, LENGTH, PARKED = (64 * number for number in range(7))
# Kinds of records.
ROUND_TOKENS, LINEAR, EMBED, NORM, ADD, COS_SIN, ROTARY_WRITE, PUT_TILES, ATTEND, MERGE_SPANS = range(1, 11)
PICK_BEST, GATE_BY, GATED_DELTA, CAP = range(11, 15)

_PIECE_BITS, _RECORD_BITS = 20, 14  # of CLAIM, from the lowest; the rest is the program's number
_FINISHED = (1 << _RECORD_BITS) - 1  # in place of a record's number: the program is done,
_CHANGING = _FINISHED - 1  # or the words beside CLAIM are about to change
PIECES_MAX, RECORDS_MAX = 1 << _PIECE_BITS, _CHANGING
_SPINS = 2000  # looks before a member offers its core to others
_YIELDS = 4000  # offers before it leaves to sleep: some milliseconds
_yield_core = types.ExternalFunction("sched_yield", types.int32())


@njit(nogil=True, inline="always")
def _pieces(record, size):
    """Into how many pieces a record is cut; 0: it is passed over."""
    kind = field(record, 0)
    if kind == LINEAR:
        pieces = linear.linear_pieces(record, size)
    elif kind == ROUND_TOKENS:
        pieces = linear.round_pieces(record, size)
    elif kind == ATTEND:
        pieces = attention.attend_pieces(record, size)
    elif kind == MERGE_SPANS:
        pieces = attention.merge_pieces(record, size)
    elif kind == ROTARY_WRITE:
        pieces = rotary.rotary_pieces(record, size)
    elif kind == GATED_DELTA:
        pieces = gated_delta.delta_pieces(record, size)
    else:
        pieces = 1 if kind == PUT_TILES else rows.row_pieces(record, size)
    return pieces


@njit(nogil=True, inline="always")
def _perform(record, piece, num_pieces, member, size, is_first):
    kind = field(record, 0)
    if kind == LINEAR:
        linear.linear(record, piece, num_pieces, member, size, is_first)
    elif kind == ROUND_TOKENS:
        linear.round_tokens(record, piece, num_pieces, member, size)
    elif kind == ATTEND:
        attention.attend(record, piece, num_pieces, member)
    elif kind == MERGE_SPANS:
        attention.merge_spans(record, piece, num_pieces, member)
    elif kind == ROTARY_WRITE:
        rotary.rotary_write(record, piece, num_pieces, member)
    elif kind == GATED_DELTA:
        gated_delta.gated_delta(record, piece, num_pieces, member)
    elif kind == PUT_TILES:
        attention_plan.put_tiles(record, piece, num_pieces)
    else:
        _perform_rows(record, piece, num_pieces)


@njit(nogil=True, inline="always")
def _perform_rows(record, piece, num_pieces):
    """What is done row by row."""
    kind = field(record, 0)
    if kind == NORM:
        rows.norm(record, piece, num_pieces)
    elif kind == ADD:
        rows.add_rows(record, piece, num_pieces)
    elif kind == COS_SIN:
        rows.cos_sin(record, piece, num_pieces)
    elif kind == GATE_BY:
        rows.gate_rows(record, piece, num_pieces)
    elif kind == CAP:
        rows.cap_rows(record, piece, num_pieces)
    elif kind == PICK_BEST:
        best_output.pick_best(record, piece, num_pieces)
    else:
        embedding.embed(record, piece, num_pieces)


@njit(nogil=True)
def _go_on(control, generation, number, size):
    """The first record from `number` on that has pieces becomes the one to work on; with none left, the end is said."""
    program, length, num_pieces = atomic_load(control + PROGRAM), atomic_load(control + LENGTH), 0
    while number < length:
        num_pieces = _pieces(program + number * RECORD_BYTES, size)
        if num_pieces > 0:
            break
        number += 1
    atomic_store(control + CLAIM, (generation << _RECORD_BITS | _CHANGING) << _PIECE_BITS)  # no claim goes by old words
    atomic_store(control + RECORD, program + number * RECORD_BYTES)
    atomic_store(control + NUM_PIECES, num_pieces)
    shown = number if number < length else _FINISHED
    atomic_store(control + CLAIM, (generation << _RECORD_BITS | shown) << _PIECE_BITS)


@njit(nogil=True, inline="always")
def _take_part(control, member, size, generation):
    """Work on a program until it is done. Nothing but the control block is read before a piece is claimed."""
    last, waited = -1, 0
    while True:
        claim = atomic_load(control + CLAIM)
        number = (claim >> _PIECE_BITS) & _FINISHED
        if claim >> (_PIECE_BITS + _RECORD_BITS) != generation or number == _FINISHED:
            return
        record, num_pieces, piece = (
            atomic_load(control + RECORD),
            atomic_load(control + NUM_PIECES),
            claim & (PIECES_MAX - 1),
        )
        if number != _CHANGING and piece < num_pieces:
            if atomic_change(control + CLAIM, claim, claim + 1):
                _perform(record, piece, num_pieces, member, size, number != last)
                last, waited = number, 0
                if atomic_add(control + DONE, 1) == num_pieces - 1:
                    atomic_store(control + DONE, 0)
                    _go_on(control, generation, number + 1, size)
            continue
        waited += 1  # others finish the record
        if waited < _SPINS:
            relax()
        else:
            _yield_core()


@njit(nogil=True)
def _announce(control, program, length, size):
    """Hand a program to the team; its number, and how many members sleep. The program 0 is the one handed out last."""
    if program == 0:
        return atomic_load(control + CLAIM) >> (_PIECE_BITS + _RECORD_BITS), 0
    generation = (atomic_load(control + CLAIM) >> (_PIECE_BITS + _RECORD_BITS)) + 1
    atomic_store(control + PROGRAM, program)
    atomic_store(control + LENGTH, length)
    _go_on(control, generation, np.int64(0), size)
    asleep = 0
    for member in range(1, size):
        asleep += atomic_add(control + PARKED + 64 * member, 0)
    return generation, asleep


@njit(nogil=True)
def _next(control, member, seen):
    """Wait for a program other than number `seen`; the same number where none has come for long."""
    waited = 0
    while atomic_load(control + CLAIM) >> (_PIECE_BITS + _RECORD_BITS) == seen:
        waited += 1
        if waited < _SPINS:
            relax()
        elif waited < _SPINS + _YIELDS:
            _yield_core()
        else:
            atomic_swap(control + PARKED + 64 * member, 1)
            if atomic_add(control + CLAIM, 0) >> (_PIECE_BITS + _RECORD_BITS) == seen:
                return seen
            atomic_swap(control + PARKED + 64 * member, 0)
            waited = 0
    return atomic_load(control + CLAIM) >> (_PIECE_BITS + _RECORD_BITS)


@njit(nogil=True, cache=True)
def enter(control, member, size, program, length, seen):
    """The one way into compiled code, so that the kernels are compiled once.

    Member 0 hands a program to the team and takes part in it until it is done; it returns at once, with how many, where
    members sleep that may be woken, and is to enter again with the program 0. Others run program after program, from
    behind number `seen` on, until none has come for a while: then they return the last one's number, or -1 where the
    team is dissolved.
    """
    generation = seen
    if member == 0:
        generation, asleep = _announce(control, program, length, size)
        if asleep > 0 or length < 0:
            return asleep
    else:
        atomic_swap(control + PARKED + 64 * member, 0)
    while True:  # what is called here is compiled into this function: each of it is called in one place
        if member > 0:
            generation = _next(control, member, seen)
            if generation == seen:
                return seen
            seen = generation
            if atomic_load(control + LENGTH) < 0:
                return -1
        _take_part(control, member, size, generation)
        if member == 0:
            return 0
