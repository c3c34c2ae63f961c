"""Failure modes that are seen in the source or in one function."""

import ast
import hmac
import pickle
from pathlib import Path

import msgspec
import pytest

from roost.errors import RequestError
from roost.messages import Abort, Refused, SessionClosed
from roost.server.body_reader import convert
from roost.server.config import ServerConfig
from roost.server.keys import NO_KEYS, read_keys
from roost.server.schema import ChatBody, GenerateBody
from roost.server.wire_format import pack, pack_command, unpack, unpack_command
from tests.tidy.source import product

RUNS_WHAT_IT_READS = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
PICKLES_INSIDE = {"multiprocessing", "concurrent.futures.process"}
# what training hands the processes that it starts itself, over pipes that nobody else can open; it serves nobody
TO_OWN_CHILDREN = {("src/roost/train/answering.py", "multiprocessing")}
CALLS = {"recv_pyobj", "send_pyobj", "torch.load", "torch.save", "eval", "exec", "numpy.load", "np.load"}


def test_37_nothing_is_pickled() -> None:
    imported = [
        f"{module.place} imports {target} {name}"
        for module in product()
        for target, name in module.imports()
        if {target.split(".")[0], name} & (RUNS_WHAT_IT_READS | PICKLES_INSIDE) or target in PICKLES_INSIDE
        if (module.place, target.split(".")[0]) not in TO_OWN_CHILDREN
    ]
    called = [
        f"{module.place} calls {ast.unparse(node.func)}"
        for module in product()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call)
        and (
            ast.unparse(node.func) in CALLS or ast.unparse(node.func).rpartition(".")[2] in ("recv_pyobj", "send_pyobj")
        )
    ]
    assert imported + called == []


class _Trap:
    """Leaves a trace when it is unpickled."""

    def __init__(self, place: Path) -> None:
        self._place = place

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self._place,)


def test_37_what_comes_over_the_wire_is_only_data(tmp_path: Path) -> None:
    told = [(3, SessionClosed(session_id="a")), (4, Refused(request_id="b", status=404, message=""))]
    assert unpack(pack(told)) == told
    assert unpack_command(pack_command(3, Abort(request_id="a"), 17)) == (3, Abort(request_id="a"), 17)
    trap = pickle.dumps(_Trap(tmp_path / "sprung"))
    for forged in (("Abort", {"request_id": 7}), ("Path", {"place": "a"}), None):
        with pytest.raises((msgspec.MsgspecError, KeyError)):
            unpack_command(trap if forged is None else msgspec.msgpack.encode((0, None, *forged)))
        with pytest.raises((msgspec.MsgspecError, KeyError)):
            unpack(trap if forged is None else msgspec.msgpack.encode([(0, *forged)]))
    assert not (tmp_path / "sprung").exists()


NOT_FINITE = ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 400, "9" * 5000)


@pytest.mark.parametrize("value", NOT_FINITE, ids=lambda value: value[:9])
@pytest.mark.parametrize("field", ["temperature", "top_p", "seed", "n", "logit_bias", "store", "zeta"])
def test_39_what_is_not_finite_is_refused_by_name(field: str, value: str) -> None:
    body = f'{{"messages": [], "{field}": {value}}}'.encode()
    with pytest.raises(RequestError) as caught:
        convert(body, ChatBody)
    assert (caught.value.status, caught.value.param) == (400, field)


def test_39_faults_are_named_by_their_place_and_briefly() -> None:
    name = "k" * 1_000_000
    for body, param in (
        (b'{"input_ids": [[1, 2], [3, NaN]]}', "input_ids[1][1]"),
        (b'{"sampling_params": [{}, {"top_p": 1e400}]}', "sampling_params[1].top_p"),
        (f'{{"{name}": NaN}}'.encode(), name[:99]),
        (f'{{"{name}": 1}}'.encode(), name[:100]),
        (b'{"text": "\\ud800"}', "text"),
        (b'{"text": ' + b"[" * 40 + b"]" * 40 + b"}", "text" + "[0]" * 31),
    ):
        with pytest.raises(RequestError) as caught:
            convert(body, GenerateBody)
        assert caught.value.param == param
        assert len(str(caught.value)) < 300


def test_40_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(left: bytes, right: bytes) -> bool:
        compared.append((left, right))
        return left == right

    monkeypatch.setattr(hmac, "compare_digest", compare)
    read_keys(ServerConfig(api_key=("a", "b", "c"))).client_of("Bearer a")
    assert compared == [(b"a", b"a"), (b"a", b"b"), (b"a", b"c")]
    for wrong in ("", "Bearer", "Bearer x", "a", "Basic a", "Bearer  a", "Bearer a "):
        with pytest.raises(RequestError) as caught:
            read_keys(ServerConfig(api_key=("a", "b"))).client_of(wrong)
        assert caught.value.status == 401
    NO_KEYS.client_of("")
