"""Planted bugs in texts: what is read, refused, escaped, looked for and rendered."""

from tests.planted.bug import Bug

_TEXT = "tests/unit/text/"

TEXT_BUGS = (
    Bug(
        "refused_before_tokenised",
        "roost.text.tokenizer",
        "        fewest = 0 if self.token_bounds is None else self.token_bounds.fewest_tokens(text)",
        "        fewest = 0",
        "a text that can never fit is tokenised all the same, and everybody waits for it",
        _TEXT + "test_token_bounds.py::test_what_can_never_fit_is_refused_before_it_is_tokenised",
    ),
    Bug(
        "long_texts_without_the_gil",
        "roost.text.tokenizer",
        "        if len(text) < _GIL_RELEASE_CHARS:",
        "        if text:",
        "a long text holds the GIL while it is tokenised",
        _TEXT + "test_token_bounds.py::test_a_long_text_is_tokenised_without_the_gil_and_just_like_a_short_one",
    ),
    Bug(
        "values_counted_unread",
        "roost.server.body_reader",
        '        num_values += outside.count(b",")',
        "        num_values += 0",
        "a body of millions of values is read before it is refused",
        "tests/unit/server/test_body_reader.py::test_too_many_values_are_refused_before_any_of_them_is_made",
    ),
    Bug(
        "stop_inside_a_stop",
        "roost.text.stops",
        "            self._ends[state] = text if is_whole else self._ends[fallback]",
        "            self._ends[state] = text if is_whole else -1",
        "a stop string that ends inside of the beginning of another is passed over",
        _TEXT + "test_stream.py::test_the_stop_that_is_complete_first_wins_and_the_longer_of_two_that_end_together",
    ),
    Bug(
        "even_number_left_out",
        "roost.text.continuation",
        "        num_last = _ENDING + (self.num_messages - OPENING - _ENDING) % 2",
        "        num_last = _ENDING",
        "a template that looks at whether a message's place is even takes a question for an answer",
        _TEXT + "test_locality.py::test_questions_and_answers_add_what_the_whole_conversation_adds",
    ),
)
