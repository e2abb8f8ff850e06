"""All contracts."""

from __future__ import annotations

from . import answers, files, grammars, messages, models, pictures, requests

CONTRACTS = (
    *requests.CONTRACTS,
    *models.CONTRACTS,
    *answers.CONTRACTS,
    *grammars.CONTRACTS,
    *messages.CONTRACTS,
    *files.CONTRACTS,
    *pictures.CONTRACTS,
)
