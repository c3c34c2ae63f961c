"""Typed reading of a config.json: a key that is missing or has an impossible value is refused by its name.

Knows nothing of models. A key that is null counts as missing, as it does for Hugging Face. Called by the families.
"""

from collections.abc import Iterable, Iterator, Mapping

from roost.errors import ConfigError


class Fields:
    """The keys of one JSON object; `place` is where it lies in the file."""

    def __init__(self, values: Mapping[str, object], place: str = "") -> None:
        self._values = {name: value for name, value in values.items() if value is not None}
        self._place = place

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def has(self, name: str) -> bool:
        """Whether a key is there, and not null."""
        return name in self._values

    def integer(self, name: str, default: int | None = None, least: int = 1) -> int:
        """A whole number."""
        value = self._value(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.wrong(name, f"must be a whole number of at least {least}, got {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A number above zero."""
        value = self._value(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self.wrong(name, f"must be a number above 0, got {value!r}")
        return float(value)

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of numbers above zero."""
        values = self._value(name, None)
        if not isinstance(values, list):
            raise self.wrong(name, f"must be a list, got {values!r}")
        return tuple(Fields({name: value}, self._place).number(name) for value in values)

    def integers(self, name: str, least: int = 0) -> tuple[int, ...]:
        """A list of whole numbers."""
        values = self._value(name, None)
        if not isinstance(values, list):
            raise self.wrong(name, f"must be a list, got {values!r}")
        return tuple(Fields({name: value}, self._place).integer(name, least=least) for value in values)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, f"must be true or false, got {value!r}")
        return value

    def choice(self, name: str, known: Iterable[str], default: str | None = None) -> str:
        """One of some words."""
        value = self._value(name, default)
        if not isinstance(value, str) or value not in known:
            raise self.wrong(name, f"is {value!r}, which is not supported; known are {', '.join(known)}")
        return value

    def choices(self, name: str, known: Iterable[str] | None = None) -> tuple[str, ...]:
        """A list of some words, or of any."""
        values = self._value(name, None)
        if not isinstance(values, list):
            raise self.wrong(name, f"must be a list, got {values!r}")
        if known is None:
            known = [value for value in values if isinstance(value, str)]
        return tuple(Fields({name: value}, self._place).choice(name, known) for value in values)

    def group(self, name: str) -> "Fields":
        """The keys of a nested object; none where it is missing."""
        values = self._value(name, {})
        if not isinstance(values, dict):
            raise self.wrong(name, f"must be an object, got {values!r}")
        return Fields(values, f"{self._place}{name}.")

    def refuse_unless(self, name: str, *neutral: object) -> None:
        """Refuse an option that would change the output, unless it has a value that changes nothing."""
        if self.has(name) and self._values[name] not in neutral:
            raise self.wrong(name, f"is {self._values[name]!r}, which is not supported")

    def refuse_others(self, known: Iterable[str]) -> None:
        """Refuse every key but the known ones."""
        for name in self._values:
            if name not in known:
                raise self.wrong(name, f"is not supported; known here are {', '.join(known)}")

    def wrong(self, name: str, message: str) -> ConfigError:
        """An error about one key."""
        return ConfigError(f"config.json: {self._place}{name} {message}")

    def _value(self, name: str, default: object) -> object:
        if self.has(name):
            return self._values[name]
        if default is None:
            raise self.wrong(name, "is missing")
        return default
