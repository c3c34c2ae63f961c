"""Bad requests drawn from the schemas: each is refused by name, and nothing of them stays."""

from tests.support.bad_requests import SESSION, Case, cases
from tests.support.server_process import Server


def test_39_every_bad_request_is_refused_by_the_name_of_its_parameter(rested: Server) -> None:
    assert rested.post("/v1/sessions", {"id": SESSION}).status_code == 201
    wrong = [told for case in cases(500, seed=39) if (told := complaint(rested, case)) is not None]
    assert not wrong, "\n".join(wrong)
    (state,) = rested.http.get("/v1/sessions").json()["data"]
    assert (state["id"], state["length"], state["turns"], state["state"]) == (SESSION, 0, 0, "idle")
    assert rested.http.delete(f"/v1/sessions/{SESSION}").status_code == 200


def complaint(server: Server, case: Case) -> str | None:
    """What is wrong with the answer to a bad request."""
    headers = {"content-type": "application/json"}
    answer = server.http.post(case.endpoint, content=case.data, headers=headers)
    said = f"{case.what} {case.endpoint} {case.data[:120]!r}: {answer.status_code} {answer.text[:200]}"
    if not 400 <= answer.status_code < 500 or len(answer.text) > 1000:
        return said
    error = answer.json()["error"]
    param = error["param"] if "param" in error else error["message"].partition(": ")[0]  # Anthropic's have none
    named = any(is_part(param or "", expected) for expected in case.params)
    return None if named and param in error["message"] else f"{said}, expected {case.params}"


def is_part(param: str, expected: str) -> bool:
    """Whether a parameter is the expected one or inside of it."""
    return param == expected or param.startswith((f"{expected}.", f"{expected}["))
