"""instructor in its modes."""

from __future__ import annotations

from importlib.metadata import version

import instructor
from case import KEY, MODEL, URL, City, case, report
from openai import OpenAI
from pydantic import BaseModel


class Place(BaseModel):
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
    extract(instructor.Mode.JSON)


@case
def strict_tools():
    extract(instructor.Mode.TOOLS_STRICT)


report(instructor=version("instructor"), openai=version("openai"))
