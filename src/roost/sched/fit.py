"""Fit: whether a request could run if the engine were empty, and how many new tokens it may have.

Pure arithmetic over the resolved configuration. Called when a request is submitted, and again when a turn that waited
for its session learns how long its prompt is.
"""

from roost.config.resolved import Resolved
from roost.errors import RequestError
from roost.messages import Submit


def resolve_max_new(resolved: Resolved, submit: Submit, prompt_len: int, session_max: int | None = None) -> int:
    """The request's max_new_tokens, or the default if absent; raises RequestError if the request can never fit."""
    if prompt_len == 0:
        raise RequestError(400, "tokens", "the session is empty: must hold at least 1 token")
    limits = {"--context": resolved.context}
    if session_max is not None:
        is_flag = session_max == resolved.session.max_session_tokens
        limits["--max-session-tokens" if is_flag else "the session's max_tokens"] = session_max
    name, limit = min(limits.items(), key=lambda item: item[1])
    most = min([limit - prompt_len, *(_most_new(resolved, book, prompt_len) for book in range(len(resolved.books)))])
    wanted = submit.max_new_tokens if submit.max_new_tokens is not None else max(1, most)
    if wanted <= most:
        if submit.min_new_tokens > wanted:  # max_new_tokens was absent: as much as fits is less than this
            why = f"{name} is {limit}" if prompt_len + wanted == limit else "an empty pool holds no more"
            said = f"a prompt of {prompt_len} tokens leaves room for {wanted} new ones: {why}"
            raise RequestError(400, "min_new_tokens", f"must be in [0, {wanted}], got {submit.min_new_tokens}; {said}")
        return wanted
    if prompt_len + wanted > limit:
        raise RequestError(
            413,
            "tokens",
            f"prompt of {prompt_len} and {wanted} new tokens exceed the maximum allowed length: {name} {limit}",
        )
    raise RequestError(
        413,
        "tokens",
        f"prompt of {prompt_len} and {wanted} new tokens need {_need(resolved, prompt_len + wanted)} pages, "
        f"an empty pool has {[book.num_pages - 1 for book in resolved.books]} of {resolved.page_size} tokens; "
        f"the maximum allowed length is {prompt_len + most}",
    )


def _need(resolved: Resolved, length: int) -> list[int]:
    """Pages per book that a request of `length` tokens, prompt and output, may need at any one time."""
    return [resolved.pages_to_hold(book, resolved.length_to_fit(book, length)) for book in range(len(resolved.books))]


def _most_new(resolved: Resolved, book: int, prompt_len: int) -> int:
    """Maximum of new tokens that a book has pages for (negative: not even the prompt fits)."""
    num_pages = resolved.books[book].num_pages - 1
    if resolved.pages_to_hold(book, resolved.row_width) <= num_pages:
        return resolved.context
    return num_pages * resolved.page_size - resolved.length_to_fit(book, prompt_len)
