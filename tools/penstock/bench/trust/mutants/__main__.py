"""`python -m penstock.bench.trust.mutants`: for who mends what survives."""

from __future__ import annotations

import asyncio
import sys

from cyclopts import App

from penstock.bench.trust.mutants.areas import AREAS
from penstock.bench.trust.mutants.measure import tested
from penstock.bench.trust.mutants.running import TestedMutant

app = App(name="mutants", help="Makes small changes and says which of them no test notices.")


@app.default
def main(*, area: list[str] | None = None, count: int = 200, seed: int = 0, verbose: bool = False) -> None:
    """Prints each that survives, and the share that was noticed.

    Parameters
    ----------
    area:
        Only these: scheduler, policy, block table, flow, identity, sampler. Default: all.
    count:
        How many changes, of all areas together.
    seed:
        Draws others.
    verbose:
        Also prints what noticed each of the others.
    """

    def tell(one: TestedMutant) -> None:
        if not one.noticed or verbose:
            said = f"noticed by {one.by}" if one.noticed else "survived"
            print(f"{said} in {one.seconds:.1f} s: {one.mutant.diff()}", flush=True)

    wanted = [one for one in AREAS if not area or one.name in area]
    done = asyncio.run(tested(wanted, count, seed, tell))
    noticed = sum(one.noticed for one in done)
    print(f"{noticed} of {len(done)} noticed, {sum(one.seconds for one in done):.0f} s")
    sys.exit(noticed < len(done))


if __name__ == "__main__":
    app()
