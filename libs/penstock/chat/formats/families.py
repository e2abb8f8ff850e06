"""The families that are known, and which of them a model belongs to."""

from __future__ import annotations

from penstock.chat.formats.deepseek import DEEPSEEK_BARE, DEEPSEEK_FENCED
from penstock.chat.formats.format import ToolFormat
from penstock.chat.formats.gemma import GEMMA, GEMMA_TOOL_CODE
from penstock.chat.formats.hermes import HERMES
from penstock.chat.formats.kimi import KIMI
from penstock.chat.formats.llama import LLAMA_JSON, LLAMA_PYTHONIC
from penstock.chat.formats.mistral import MISTRAL, MISTRAL_LIST
from penstock.chat.formats.phi import PHI

NO_CALLS = ToolFormat(name="none", heads=())
"""A model whose template shows no calls: its answers are content, and reasoning."""

FAMILIES = (
    HERMES, MISTRAL, MISTRAL_LIST, KIMI, DEEPSEEK_FENCED, DEEPSEEK_BARE, PHI, GEMMA, GEMMA_TOOL_CODE, LLAMA_PYTHONIC,
    LLAMA_JSON,
)  # fmt: skip
FORMATS = {family.name: family for family in (*FAMILIES, NO_CALLS)}


def recognise(template: str) -> ToolFormat:
    """The first family to which a chat template's text belongs; NO_CALLS when there is none."""
    return next((family for family in FAMILIES if family.recognised(template)), NO_CALLS)
