"""Bad requests drawn from the schemas: each is refused by name, and nothing of them stays."""

from tests.server.cases import Case, cases
from tests.server.process import Server


def test_failure_mode_39_every_bad_request_is_refused_by_the_name_of_its_parameter(rested: Server) -> None:
    wrong = [told for case in cases(500, seed=39) if (told := complaint(rested, case)) is not None]
    assert not wrong, "\n".join(wrong)


def complaint(server: Server, case: Case) -> str | None:
    """What is wrong with the answer to a bad request."""
    headers = {"content-type": "application/json"}
    answer = server.http.post(case.endpoint, content=case.data, headers=headers)
    said = f"{case.what} {case.endpoint} {case.data[:120]!r}: {answer.status_code} {answer.text[:200]}"
    if not 400 <= answer.status_code < 500 or len(answer.text) > 1000:
        return said
    error = answer.json()["error"]
    named = any(is_part(error["param"] or "", param) for param in case.params)
    return None if named and error["param"] in error["message"] else f"{said}, expected {case.params}"


def is_part(param: str, expected: str) -> bool:
    """Whether a parameter is the expected one or inside of it."""
    return param == expected or param.startswith((f"{expected}.", f"{expected}["))
