"""Composed prompts: tasks like those of real traffic, made of the passages in given texts and of made-up records.

Summaries, translation, retrieval from long contexts, rewriting of lists, texts and code, JSON, calls of tools and
conversations of several turns. The same texts always give the same prompts, and more of them begin with the same. Reads
no file. Called by those who make answers.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from string import ascii_lowercase

from roost.train import composed_wordings as wordings

LINE_CHARS_MIN = 200  # a shorter line is no passage: an instruction, or a question
PASSAGE_CHARS_MIN = 450
LONG_CHARS = (4_000, 11_500)  # of a long context: 1,000 to 3,000 tokens
_LABEL = re.compile(r"^[A-Z][A-Za-z ]{0,24}: ")
_SENTENCE = re.compile(r"(?<=[.!?])\s+")
_CODE = re.compile(r"^\s*(def |function |class |for |while |let |const |#include|public |import )", re.MULTILINE)
_TYPO_EVERY = 9  # words


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A made-up person in a list."""

    name: str
    job: str
    city: str
    number: int

    def line(self, form: str, at: int) -> str:
        """The record as a line of a list."""
        return form.format(at=at, name=self.name, job=self.job, city=self.city, number=self.number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """What prompts are composed of."""

    passages: tuple[str, ...]
    codes: tuple[str, ...]

    @classmethod
    def of(cls, texts: Sequence[str]) -> "Material":
        """The passages and pieces of code in some texts."""
        passages = (_passage(text) for text in texts)
        codes = (text.split("\n\n", 1)[-1] for text in texts if len(_CODE.findall(text)) > 1)
        return cls(
            passages=tuple(dict.fromkeys(each for each in passages if each)),
            codes=tuple(dict.fromkeys(each for each in codes if _CODE.search(each))),
        )


def compose(texts: Sequence[str], number: int) -> list[list[str]]:
    """`number` conversations, each a list of its user's messages."""
    if not number:
        return []
    material = Material.of(texts)
    kinds, weights = zip(*((make, weight) for make, weight in _KINDS.items() if _can(make, material)), strict=True)
    found: list[list[str]] = []
    for seed in range(number):
        random = Random(seed)  # of its own, so that a prompt does not depend on how many there are
        (make,) = random.choices(kinds, weights)
        found.append(make(random, material))
    return found


def _can(make: "Maker", material: Material) -> bool:
    """Whether there is what such prompts are made of."""
    return bool(material.codes if make is _code else make in _WITHOUT_TEXTS or material.passages)


def _passage(text: str) -> str:
    """The long lines of a text, without their labels; empty if there is little."""
    lines = [_LABEL.sub("", line.strip()) for line in text.split("\n") if len(line) >= LINE_CHARS_MIN]
    found = "\n".join(lines).strip(" \"'")
    return found if len(found) >= PASSAGE_CHARS_MIN and not _CODE.search(found) else ""


def _sentences(text: str) -> list[str]:
    return [each for each in _SENTENCE.split(text) if len(each) > 20] or [text]


def _short(random: Random, text: str, most: int) -> str:
    """One to `most` consecutive sentences of a text."""
    sentences = _sentences(text)
    first = random.randrange(len(sentences))
    return " ".join(sentences[first : first + random.randint(1, most)])


def _documents(random: Random, material: Material, chars: int) -> list[str]:
    """Different passages, at least two, of about so many characters in all."""
    count = min(len(material.passages), 24)
    chosen: list[str] = []
    for passage in random.sample(material.passages, count):
        if len(chosen) >= 2 and sum(map(len, chosen)) + len(passage) > chars:
            break
        chosen.append(passage)
    return chosen


def _joined(random: Random, documents: Sequence[str]) -> str:
    form = random.choice(
        ("[{at}] {text}", "Document {at}: {text}", "### Document {at}\n{text}", '<doc id="{at}">\n{text}\n</doc>')
    )
    return "\n\n".join(form.format(at=at, text=text) for at, text in enumerate(documents, 1))


def _records(random: Random, count: int) -> list[Member]:
    names = [f"{first} {last}" for first in wordings.FIRST_NAMES for last in wordings.LAST_NAMES]
    return [
        Member(
            name=name,
            job=random.choice(wordings.JOBS),
            city=random.choice(wordings.CITIES),
            number=random.randrange(1000, 10_000),
        )
        for name in random.sample(names, count)
    ]


def _listed(random: Random, records: Sequence[Member]) -> str:
    form = random.choice(wordings.RECORD_LINES)
    return "\n".join(each.line(form, at) for at, each in enumerate(records, 1))


def _broken(random: Random, text: str) -> str:
    """A text with mistakes in some of its words: letters that are swapped, doubled, dropped or wrong."""
    words = text.split(" ")
    for at, word in enumerate(words):
        if len(word) > 3 and random.randrange(_TYPO_EVERY) == 0:
            place = random.randrange(1, len(word) - 1)
            kinds = (word[place + 1] + word[place], word[place] * 2 + word[place + 1], word[place + 1])
            middle = random.choice((*kinds, random.choice(ascii_lowercase) + word[place + 1]))
            words[at] = word[:place] + middle + word[place + 2 :]
    return " ".join(words)


def _summary(random: Random, material: Material) -> list[str]:
    length = random.choice(wordings.LENGTHS)
    if random.random() < 0.3:
        documents = _documents(random, material, random.randrange(2_000, LONG_CHARS[1]))
        form, text = random.choice(wordings.MANY_SUMMARIES), _joined(random, documents)
        return [form.format(number=len(documents), length=length, text=text)]
    return [random.choice(wordings.SUMMARIES).format(length=length, text=random.choice(material.passages))]


def _translation(random: Random, material: Material) -> list[str]:
    if random.random() < 0.1:
        language, text = random.choice(wordings.NOT_ENGLISH)
        also = [other for known, other in wordings.NOT_ENGLISH if known == language and other != text]
        text = " ".join([text, *random.sample(also, random.randint(0, len(also)))])
        return [random.choice(wordings.INTO_ENGLISH).format(language=language, text=text)]
    text = _short(random, random.choice(material.passages), 8)
    return [random.choice(wordings.TRANSLATIONS).format(language=random.choice(wordings.LANGUAGES), text=text)]


def _retrieval(random: Random, material: Material) -> list[str]:
    documents = _documents(random, material, random.randrange(2_500, LONG_CHARS[1]))
    which = random.randrange(len(documents))
    fragment = " ".join(random.choice(_sentences(documents[which])).split()[: random.randint(4, 8)])
    question = random.choice(wordings.FACT_QUESTIONS).format(which=which + 1, fragment=fragment)
    text, form = _joined(random, documents), random.choice(wordings.RETRIEVALS)
    return [form.format(text=text, question=question, number=len(documents))]


def _lookup(random: Random, _material: Material) -> list[str]:
    records = _records(random, random.choice((8, 15, 25, 40, 60, 90)))
    form, is_about_one = random.choice(wordings.RECORD_QUESTIONS)
    one, field = random.choice(records), random.choice(("job", "city", "number"))
    question = form.format(
        name=one.name, city=one.city, field=field, value=getattr(one, field), number=1 + records.index(one)
    )
    turns = [
        random.choice(wordings.RECORD_FRAMES).format(
            count=len(records), list=_listed(random, records), question=question
        )
    ]
    if is_about_one and random.random() < 0.2:
        turns.append(f"And {random.choice(records).name}?")
    return turns


def _list_rewrite(random: Random, _material: Material) -> list[str]:
    records = _records(random, random.choice((4, 6, 9, 12, 18, 25)))
    one, (other,) = random.choice(records), _records(random, 1)
    field = random.choice(("name", "city", "job", "number"))
    form = random.choice(wordings.LIST_REWRITES)
    return [form.format(list=_listed(random, records), field=field, city=one.city, name=one.name, other=other.name)]


def _text_rewrite(random: Random, material: Material) -> list[str]:
    text = _short(random, random.choice(material.passages), 10)
    return [random.choice(wordings.TEXT_REWRITES).format(text=text, broken=_broken(random, text))]


def _code(random: Random, material: Material) -> list[str]:
    return [random.choice(wordings.CODE_REWRITES).format(code=random.choice(material.codes))]


def _extraction(random: Random, material: Material) -> list[str]:
    if random.random() < 0.4:
        records = _records(random, random.randint(2, 10))
        form, one = random.choice(wordings.RECORD_JSON), records[0]
        line = one.line(random.choice(wordings.RECORD_LINES), 1)
        return [form.format(line=line, name=one.name, list=_listed(random, records))]
    text = random.choice(material.passages)
    return [random.choice(wordings.EXTRACTIONS).format(text=text, schema=random.choice(wordings.SCHEMAS))]


def _tools(random: Random, _material: Material) -> list[str]:
    chosen = random.sample(wordings.TOOLS, random.randint(2, 7))
    described = [{"name": name, "description": what, "parameters": fields} for name, what, fields in chosen]
    indent = random.choice((None, 1, 2))
    return [
        random.choice(wordings.TOOL_FRAMES).format(
            tools="\n".join(json.dumps(each, indent=indent) for each in described),
            request=_filled(random, random.choice(wordings.REQUESTS)),
        )
    ]


def _talk(random: Random, material: Material) -> list[str]:
    """A conversation: an opener, or a task of another kind, and one to three further messages."""
    if random.random() < 0.5 and material.passages:
        turns = random.choice((_summary_of_one, _text_rewrite, _extraction, _translation))(random, material)
    else:
        turns = [_filled(random, random.choice(wordings.OPENERS))]
    count = random.choices((1, 2, 3), (6, 3, 1))[0]
    return [*turns, *(_filled(random, each) for each in random.sample(wordings.FOLLOW_UPS, count))]


def _summary_of_one(random: Random, material: Material) -> list[str]:
    text = random.choice(material.passages)
    return [random.choice(wordings.SUMMARIES).format(length=random.choice(wordings.LENGTHS), text=text)]


def _opener(random: Random, _material: Material) -> list[str]:
    return [_filled(random, random.choice(wordings.OPENERS))]


def _filled(random: Random, form: str) -> str:
    (one,) = _records(random, 1)
    return form.format(
        name=one.name,
        city=one.city,
        day=random.choice(wordings.DAYS),
        number=random.randrange(5, 100),
        small=random.randrange(2, 9),
        language=random.choice(wordings.LANGUAGES),
        subject=random.choice(wordings.SUBJECTS),
    )


Maker = Callable[[Random, Material], list[str]]
_KINDS: dict[Maker, int] = {  # shares, in percent
    _summary: 15,
    _translation: 12,
    _retrieval: 11,
    _lookup: 9,
    _list_rewrite: 9,
    _text_rewrite: 10,
    _code: 6,
    _extraction: 8,
    _tools: 6,
    _talk: 12,
    _opener: 2,
}
_WITHOUT_TEXTS = (_lookup, _list_rewrite, _tools, _opener, _talk)
