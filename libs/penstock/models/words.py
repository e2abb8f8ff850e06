"""Where the generator's words come from, and which of them are kept for evaluation only.

Every word, name and phrasing is on one side of the split for good: `held_out` is a pure function of its
spelling, so training and evaluation can never share one, whatever their seeds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import TypeVar

T = TypeVar("T")
WORDNET = Path("/usr/share/wordnet")


def words(text: str) -> tuple[str, ...]:
    """The words of a text."""
    return tuple(text.split())


NOUNS = words(
    """account address agenda alarm album amount answer apple archive area article asset author badge balance
    bank basket battery bed bench bill bird boat body bond book border bottle box branch bread bridge brush
    bucket budget building button cabin cable cake calendar camera campaign candle canvas card cargo carpet
    case castle cat chair channel chapter charge chart circle city claim class client clock cloud coach coat
    code coin color column comment company contact contract cost country course cover crate credit crew crop
    cup currency customer cycle date day deal debt deck delay delivery demand desk device diary diet discount
    dish distance doctor document dog door draft drawer dress drink driver duty earth edge edition editor
    effect egg email engine entry event exam factory fare farm fee fence field file film filter fine fire fish
    flag fleet flight floor flower folder food forest fork form frame fridge friend fruit fuel game garden
    gate gift glass goal grade grain grant graph grass group guest guide habit hall handle harbor hat height
    hero hill holiday home horse hotel hour house image index inbox insect invoice island issue item jacket
    job journal journey judge juice key kitchen knife label ladder lake lamp language laptop law lawyer layer
    league lease leaf lecture length lesson letter level library licence light limit line link list loan
    location lock log loss lunch machine magazine mail manager map margin market mask match meal measure
    medal meeting member memo menu message meter mile mirror mission model moment monitor month moon motor
    mountain mouse movie museum name network newspaper night nose note notice novel number nurse object
    office offer oil option orange order owner package page paint pair panel paper parcel park part partner
    party pass password patient payment pen pencil permit person phone photo piano picture piece pilot pipe
    place plan planet plant plate player plot pocket poem point policy pool port position post poster potato
    price printer prize process product profile profit project proof proposal purse quality queue quota
    quote radio rain range rate rating ratio reader receipt recipe record region relay release rent report
    request reserve result reward rice ride ring river road robot role roof room root route row rule salary
    sale sample sand scale scene schedule school science score screen script sea season seat section sector
    seed sensor series server service session shadow shape share shelf shell shift ship shirt shoe shop side
    sign signal site size skill sky snow soil song sort sound source spot spring square staff stage stamp
    star station status steam step stock stone store storm story stream street student studio style subject
    sugar suit summary sun supply survey switch symbol system table tank target task tax taxi teacher team
    ticket tide timer title tool topic tour tower town track trade traffic trail train tree trend trial trip
    truck tunnel uncle unit user valley value vendor version video view village visit voice volume vote
    voucher wage wall wallet warehouse watch water wave weather week weight wheel window wine winter wire
    wood word worker world yard year zone"""
)
ADJECTIVES = words(
    """amber annual blue bold brief bright broad calm central cheap clean clear cold cool daily dark deep
    digital direct double dry early east empty equal exact extra fair fast final fine first fixed flat free
    fresh full general gentle global gold grand gray green happy hard heavy high hot huge inner joint large
    last late light local lost loud low lucky main major middle mild minor modern monthly narrow near new
    next nice noble north old open outer pale past plain prime private proud public pure quick quiet rapid
    rare raw ready real red rich right rough round royal safe second secret sharp short silent silver simple
    single slow small smart smooth soft solid south spare special square steady steep strong sunny sweet
    swift tall thick thin third tidy tiny total upper urgent vast warm weekly west white whole wide wild
    yellow young"""
)
QUERY_VERBS = ("get", "find", "fetch", "check", "read", "show", "retrieve", "query", "lookup", "inspect")
ACTION_VERBS = words(
    """create delete update send book cancel add remove start stop schedule set open close move copy rename
    submit approve reject assign reset lock unlock archive publish pause resume print order return enable
    disable register share merge split upload download reserve confirm notify invite clear restart"""
)
CITIES = words(
    """Oslo Bergen Paris London Berlin Madrid Rome Vienna Prague Warsaw Dublin Lisbon Athens Helsinki
    Stockholm Copenhagen Brussels Amsterdam Zurich Geneva Munich Hamburg Milan Naples Porto Seville Tokyo
    Osaka Kyoto Seoul Beijing Shanghai Delhi Mumbai Cairo Lagos Nairobi Accra Tunis Rabat Boston Chicago
    Denver Austin Dallas Seattle Portland Toronto Montreal Vancouver Lima Quito Bogota Santiago Havana
    Sydney Melbourne Perth Auckland Wellington Reykjavik Riga Vilnius Tallinn Krakow Budapest Belgrade
    Zagreb Sofia Bucharest Istanbul Ankara Tbilisi Baku Doha Dubai Hanoi Manila Jakarta Bangkok
    Singapore"""
)
FIRST_NAMES = words(
    """Ada Alan Alice Amir Anna Ben Bruno Carla Carlos Clara Dana David Elena Emil Emma Eric Eva Felix Fiona
    Frank Grace Hana Hugo Ida Igor Ines Ivan Jack Jana Jonas Julia Karen Karl Lara Leo Lena Lily Linda Lucas
    Luis Maria Mark Martin Maya Mia Milan Nina Noah Nora Olga Oliver Omar Oscar Paul Peter Rosa Ruth Sam
    Sara Simon Sofia Stella Tom Uma Vera Victor Yuki Zoe"""
)

_ONSETS = words("b c d f g h j k l m n p r s t v w z bl br ch cl cr dr fl fr gl gr kl kr pl pr sh sk sl sn sp st th tr")
_VOWELS = words("a e i o u a e i o u ai ea oo ou")
_CODAS = ("", "", "", "l", "m", "n", "r", "s", "t", "k", "x", "rd", "nt", "sk", "mp")


def held_out(text: str, share: int = 10) -> bool:
    """Whether `text` belongs to evaluation: one in `share`, decided by its spelling alone."""
    return hashlib.blake2b(text.lower().encode(), digest_size=2).digest()[0] % share == 0


def lexicon(directory: Path = WORDNET) -> tuple[str, ...]:
    """Common English nouns: WordNet's single words that occur in its tagged texts; empty where it is missing."""
    path = directory / "index.noun"
    if not path.exists():
        return ()
    rows = (line.split() for line in path.read_text(encoding="latin-1").splitlines() if line[0] != " ")
    words = ((row[0], row[5 + int(row[3])]) for row in rows)
    return tuple(w for w, tagged in words if tagged != "0" and w.isascii() and w.isalpha() and 3 <= len(w) <= 10)


class Side:
    """One side of the split: the words and phrasings that training, or that evaluation, may use.

    Phrasings are lists too short to halve by spelling; `phrases` keeps every fifth one for evaluation.
    Evaluation draws held-out words and phrasings only; plain cities and given names are shared, for they
    are ordinary vocabulary rather than something to generalise over.
    """

    def __init__(self, evaluation: bool) -> None:
        self.evaluation = evaluation
        common = lexicon()
        self.everything = common + NOUNS + ADJECTIVES  # both sides: only to be repeated, never to be chosen by
        self.lexicon = self._keep(common)
        self.nouns = self._keep(NOUNS)
        self.adjectives = self._keep(ADJECTIVES)

    def _keep(self, words: Sequence[str]) -> tuple[str, ...]:
        return tuple(word for word in words if held_out(word) == self.evaluation)

    def phrases(self, options: Sequence[T]) -> Sequence[T]:
        """The phrasings of `options` on this side; lists of fewer than five are shared."""
        if len(options) < 5:
            return options
        return [p for i, p in enumerate(options) if (i % 5 == 4) == self.evaluation]

    def pseudo(self, rng: Random, syllables: int = 0) -> str:
        """A pronounceable word that means nothing, of two or three syllables unless told."""
        while True:
            count = syllables or rng.choice((2, 2, 3))
            parts = [rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(count)]
            word = "".join(parts) + rng.choice(_CODAS)
            if held_out(word) == self.evaluation:
                return word

    def noun(self, rng: Random) -> str:
        """A noun to name a tool, a parameter or a field by: meaningless or English."""
        draw = rng.random()
        if draw < 0.4:
            return self.pseudo(rng)
        return rng.choice(self.lexicon if draw < 0.7 and self.lexicon else self.nouns)

    def proper(self, rng: Random) -> str:
        """A capitalised name: mostly meaningless, sometimes a given name or a city."""
        draw = rng.random()
        if draw < 0.7:
            return self.pseudo(rng).capitalize()
        return rng.choice(FIRST_NAMES if draw < 0.85 else CITIES)
