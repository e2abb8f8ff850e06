"""The clients whose Attach streams are open."""

from __future__ import annotations

from penstock.errors import NotFound
from penstock.kvstore.table.blocks import Attachment


class Attachments:
    """By their ids, which are never used twice."""

    def __init__(self) -> None:
        self._open: dict[str, Attachment] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, attachment_id: str) -> bool:
        return attachment_id in self._open

    def add(self, attachment_id: str, client: str) -> None:
        """A client has attached."""
        assert attachment_id not in self._open
        self._open[attachment_id] = Attachment(attachment_id, client)

    def of(self, attachment_id: str) -> Attachment:
        """An open attachment. Raises NotFound."""
        found = self._open.get(attachment_id)
        if found is None:
            raise NotFound("no such attachment: attach first", field="attachment_id")
        return found

    def pop(self, attachment_id: str) -> Attachment:
        """Ends an attachment; the caller takes back its leases and reservations."""
        return self._open.pop(attachment_id)
