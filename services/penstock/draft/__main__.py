"""`python -m penstock.draft`."""

from penstock.draft.config import DraftConfig
from penstock.draft.service import open_draft
from penstock.runtime.service import service_main

app = service_main("draft", "Proposes continuations that decode workers verify.", DraftConfig, open_draft)

if __name__ == "__main__":
    app()
