"""Locality: whether what a template writes for a message depends only on messages near it, judged by its source.

A local template has one loop over the conversation, whose body reads the message, its neighbours, the first and the
last messages and whether its index is even, and keeps no state between iterations. An even number of messages can then
be left out of the middle without changing what is written for the end. A construct that is not known here makes a
template not local. Never sees messages. Called by text.template.
"""

from collections.abc import Container, Iterable, Iterator

from jinja2 import nodes

OPENING = 4  # first messages that a local template may read by index
_ENDING = 2  # and last ones
_COUNT_MAX = 2  # an index or a length may only be compared with numbers up to this
_OF_LOOP = ("first", "last", "previtem", "nextitem")
_KEEPS_STATE = ("cycler", "joiner", "lipsum")  # globals whose values change with every use
_LAZY = ("map", "select", "reject", "selectattr", "rejectattr", "batch", "slice", "random")  # one-shot, or random


def is_local(template: nodes.Template) -> bool:
    """Whether leaving out the middle of a conversation does not change what is written for its end."""
    try:
        _Reader().read(template)
    except _NotLocalError:
        return False
    return True


class _NotLocalError(Exception):
    """The template has a construct that may depend on any message."""


class _Reader:
    """Walks a template's syntax tree."""

    def __init__(self) -> None:
        self._skips = {"messages": 0}  # names bound to the conversation -> most first messages that are sliced off
        self._num_loops = 0

    def read(self, node: nodes.Node, *, is_inner: bool = False, has_loop: bool = False) -> None:
        """Check a node and its children.

        `is_inner`: inside a loop, a macro or the like; `has_loop`: inside the loop over the conversation.
        """
        skipped = self._skipped(_source(node))
        match node:
            case nodes.For() if skipped is not None:
                self._read_loop(node, is_inner=is_inner)
            case nodes.For():
                for part in node.iter_child_nodes(exclude=("body", "target")):
                    self.read(part, is_inner=True, has_loop=has_loop)
                for part in node.body:
                    self.read(part, is_inner=True)  # here `loop` is the inner loop's
            case nodes.Assign(target=nodes.Name(name=name)) if skipped is not None and not is_inner:
                self._skips[name] = max(skipped, self._skips.get(name, 0))
            case nodes.Getitem() if skipped is not None:
                self._check_place(node.arg, skipped, has_loop=has_loop)
            case nodes.Compare() if self._is_count(node.expr, has_loop=has_loop):
                _check_numbers((each.expr for each in node.ops), range(_COUNT_MAX + 1))
            case nodes.Mod() if self._is_count(node.left, has_loop=has_loop):
                _check_numbers([node.right], (2,))
            case nodes.Getattr(node=nodes.Name(name="loop"), attr=name) if has_loop and name in _OF_LOOP:
                pass
            case _:
                self._check_other(node, has_loop=has_loop)
                goes_in = is_inner or not isinstance(node, nodes.Template | nodes.If)
                for part in node.iter_child_nodes():
                    self.read(part, is_inner=goes_in, has_loop=has_loop)

    def _read_loop(self, node: nodes.For, *, is_inner: bool) -> None:
        self._num_loops += 1
        if is_inner or node.test or node.recursive or node.else_ or self._num_loops > 1 or any(_breaks(node.body)):
            raise _NotLocalError
        for part in node.body:
            self.read(part, is_inner=True, has_loop=True)

    def _check_other(self, node: nodes.Node, *, has_loop: bool) -> None:
        match node:
            case nodes.Name(name=name) if name in self._skips or name in _KEEPS_STATE or (has_loop and name == "loop"):
                raise _NotLocalError
            case nodes.NSRef() | nodes.Block() | nodes.Include() | nodes.Import() | nodes.FromImport():
                raise _NotLocalError
            case nodes.Filter(name=name) if name in _LAZY and not has_loop:
                raise _NotLocalError

    def _skipped(self, node: nodes.Node | None) -> int | None:
        """Most first messages that a name or a slice of the conversation leaves out; None: it is neither."""
        match node:
            case nodes.Name(name=name):
                return self._skips.get(name)
            case nodes.Getitem(node=inner, arg=nodes.Slice(start=nodes.Const(value=int(start)), stop=None, step=None)):
                before = self._skipped(inner)
                return before + start if before is not None and start >= 0 and before + start < OPENING else None
        return None

    def _check_place(self, place: nodes.Node, skipped: int, *, has_loop: bool) -> None:
        match place:
            case nodes.Const(value=int(number)) if -_ENDING <= number < OPENING - skipped:
                return
            case nodes.Neg(node=nodes.Const(value=int(number))) if number <= _ENDING:
                return
            case nodes.Add(left=at, right=nodes.Const(value=1)) | nodes.Sub(left=at, right=nodes.Const(value=1)):
                if has_loop and _is_index(at):
                    return
        raise _NotLocalError

    def _is_count(self, node: nodes.Node, *, has_loop: bool) -> bool:
        """Whether it is the index of a message, or the number of messages."""
        match node:
            case nodes.Filter(node=inner, name="length" | "count") if inner is not None:
                return self._skipped(inner) is not None
        return has_loop and _is_index(node)


def _source(node: nodes.Node) -> nodes.Node | None:
    """What a loop iterates over, an assignment assigns, or a subscript indexes."""
    match node:
        case nodes.For():
            return node.iter
        case nodes.Assign() | nodes.Getitem():
            return node.node
    return None


def _is_index(node: nodes.Node) -> bool:
    match node:
        case nodes.Getattr(node=nodes.Name(name="loop"), attr="index0" | "index"):
            return True
    return False


def _check_numbers(given: Iterable[nodes.Node], allowed: Container[object]) -> None:
    if not all(isinstance(each, nodes.Const) and each.value in allowed for each in given):
        raise _NotLocalError


def _breaks(body: list[nodes.Node]) -> Iterator[bool]:
    for node in body:
        yield isinstance(node, nodes.Break)
        yield from (True for _ in node.find_all(nodes.Break))
