"""Pictures in a prompt: the chat template writes one token for each, in whose place the tokens of the picture come."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from penstock.chat.messages import PictureLink
from penstock.checkpoint import PictureForm
from penstock.errors import InvalidRequest
from penstock.pictures.picture import Picture, ShownPicture
from penstock.pictures.reading import read_picture
from penstock.pictures.seeing import seen, texts_of, tokens_of


@dataclass(frozen=True, slots=True)
class PictureTokens:
    """How a model's prompts show pictures."""

    form: PictureForm
    ids: Mapping[str, int]
    """Of `texts_of` the form, by their names there."""
    reader: Callable[[str, str], Picture] | None = None
    """Reads the picture of a data: URL, for an error that names its field; None: this process does."""

    def read(self, link: PictureLink) -> Picture:
        """A picture that a client sends. Takes a while. Raises InvalidRequest and Unavailable."""
        if self.reader is not None:
            return self.reader(link.url, link.at)
        return seen(read_picture(link.url, link.at), self.form, link.at)

    def tokens_before(self, ids: Sequence[int], shown: Sequence[ShownPicture], count: int) -> int:
        """How many tokens the first `count` of a rendered prompt are, with those of their pictures."""
        passed = sum(token == self.ids["whole"] for token in ids[:count])
        return count + sum(one.count - 1 for one in shown[:passed])

    def placed(
        self, ids: Sequence[int], pictures: Sequence[Picture], field: str
    ) -> tuple[array[int], tuple[ShownPicture, ...]]:
        """The tokens of a rendered prompt with those of its pictures, and where these are. Raises InvalidRequest that
        names `field` when the template does not show all of them."""
        whole, at = self.ids["whole"], [place for place, token in enumerate(ids) if token == self.ids["whole"]]
        if len(at) != len(pictures):
            what = f"{field}: the model's chat template shows {len(at)} of {len(pictures)} pictures"
            raise InvalidRequest(what, field=field)
        found, shown = array("I"), []
        rest = iter(pictures)
        for token in ids:
            if token != whole:
                found.append(token)
                continue
            picture = next(rest)
            own = tokens_of(picture.grid, self.form, self.ids)
            shown.append(ShownPicture(picture, len(found), len(own)))
            found.extend(own)
        return found, tuple(shown)


def picture_tokens(form: PictureForm | None, added: Mapping[str, int]) -> PictureTokens | None:
    """How prompts show pictures; None for a model without them, and for a tokenizer that lacks their tokens. `added`
    has the ids of added tokens by their texts."""
    if form is None or not all(text in added for text in texts_of(form).values()):
        return None
    ids = {name: added[text] for name, text in texts_of(form).items()}
    return PictureTokens(form, ids) if ids["patch"] == form.token else None
