"""instructor in its modes."""

from __future__ import annotations

from importlib.metadata import version

import instructor
from case import KEY, MODEL, URL, City, case, report
from instructor.core import IncompleteOutputException, InstructorRetryException
from openai import OpenAI
from pydantic import BaseModel


class Place(BaseModel, extra="forbid"):
    """Forbids other names, which a small model would go on with to the limit."""

    city: City


def extract(mode: instructor.Mode) -> None:
    client = instructor.from_openai(OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0), mode=mode)
    found = client.chat.completions.create(
        model=MODEL,
        response_model=Place,
        messages=[{"role": "user", "content": "Which city? Oslo"}],
        max_tokens=300,
        max_retries=2,
    )
    assert isinstance(found, Place)


@case
def tools():
    extract(instructor.Mode.TOOLS)


@case
def structured():
    extract(instructor.Mode.JSON_SCHEMA)


@case
def json_object():
    """Any object, which a small model may fill to the limit, or with other names than it was asked for."""
    try:
        extract(instructor.Mode.JSON)
    except (IncompleteOutputException, InstructorRetryException) as error:
        assert "Error code" not in str(error), error


@case
def strict_tools():
    extract(instructor.Mode.TOOLS_STRICT)


report(instructor=version("instructor"), openai=version("openai"))
