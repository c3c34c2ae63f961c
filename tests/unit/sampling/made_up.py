"""A sampling parameter that is defined in `sampling.params` and nowhere else: where it can be found then.

Runs in a process of its own, because the definition has to be there before anything is imported. Prints what it found
as JSON, for the test beside it.
"""

import json
import sys
from argparse import ArgumentParser
from typing import Any

from tests.planted.apply import plant
from tests.planted.bug import Bug

NAME, DEFAULT, GIVEN, TOO_LARGE = "made_up", 0.25, 0.5, 0.75
HELP = "what nobody has heard of"
PLACE = "    min_p: float = parameter("  # it is defined before this one
DEFINITION = f'    {NAME}: float = parameter({DEFAULT}, help="{HELP}", allowed=Allowed(low=0, high={GIVEN}))'
PARAMETER = Bug(NAME, "roost.sampling.params", PLACE, f"{DEFINITION}\n{PLACE}", "not a bug: a new parameter")


def found() -> dict[str, Any]:
    """What each interface makes of it."""
    import numpy as np  # noqa: PLC0415 (after the definition)

    from roost.cli import generation_flags, remote_sessions  # noqa: PLC0415
    from roost.device.cpu import CpuDevice  # noqa: PLC0415
    from roost.errors import RequestError  # noqa: PLC0415
    from roost.front.options import Options, submits  # noqa: PLC0415
    from roost.sampling.sampler import Sampler  # noqa: PLC0415
    from roost.server import native, schema, wire_format  # noqa: PLC0415
    from roost.server.body_reader import convert  # noqa: PLC0415
    from roost.step import RowId, RowSetup  # noqa: PLC0415
    from tests.parity.parameters import section  # noqa: PLC0415
    from tests.support.small_vocabularies import byte_level  # noqa: PLC0415

    def refused(value: Any) -> list[str]:
        try:
            (submit,) = submits("r", (1,), Options(**{NAME: value}), byte_level())
            submit.sampling.check(8)
        except RequestError as error:
            return [error.param, error.reason]
        return []

    parser = ArgumentParser()
    generation_flags.add_flags(parser, temperature=0, max_new_tokens=1)
    chat = convert(json.dumps({"messages": [], NAME: GIVEN}).encode(), schema.ChatBody)
    generate = convert(json.dumps({"text": "a", "sampling_params": {NAME: GIVEN}}).encode(), schema.GenerateBody)
    assert isinstance(generate.sampling_params, schema.SamplingBody)
    options = {
        "library": Options(**{NAME: GIVEN}),
        "openai": schema.openai_options(chat),
        "sglang": schema.native_options(generate.sampling_params),
        "command line": generation_flags.options_of(parser.parse_args(["--made-up", str(GIVEN)])),
    }
    (submit,) = submits("r", (1,), options["library"], byte_level())
    _, arrived, _ = wire_format.unpack_command(wire_format.pack_command(1, submit, None))
    sampler = Sampler(2, 8, CpuDevice())
    tokens = np.empty(0, dtype=np.int32)
    sampler.set_row(
        RowSetup(row=RowId(1), sampling=arrived.sampling, prompt_len=1, min_len=1, stop_ids=(), tokens=tokens)
    )
    return {
        "default": vars_of(Options())[NAME],
        "options": {interface: vars_of(each)[NAME] for interface, each in options.items()},
        "help": parser.format_help(),
        "remote": remote_sessions._body(options["library"]),
        "path": native._names(generate, 0)[NAME],
        "wire": vars_of(arrived.sampling)[NAME],
        "row": sampler.numbers[NAME].tolist(),
        "refused": {"range": refused(TOO_LARGE), "type": refused("much"), "good": refused(GIVEN)},
        "docs": [line for line in section() if f"`{NAME}`" in line],
    }


def vars_of(record: Any) -> dict[str, Any]:
    """The values of a record."""
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


if __name__ == "__main__":
    plant(PARAMETER)
    json.dump(found(), sys.stdout)
