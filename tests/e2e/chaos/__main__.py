"""`make chaos SEED=7 MINUTES=30`: storms and faults for the given time, and a summary at the end."""

import argparse
import random
import sys
import time

from tests.e2e import programs
from tests.e2e.chaos.campaign import Campaign, Summary, total
from tests.e2e.chaos.faults import FAULTS


def main() -> int:
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="which run; a new one every time if left out")
    parser.add_argument("--minutes", type=float, default=0.0, help="go on with the next seeds until then")
    parser.add_argument("--pods", type=int, default=1000, help="in each storm")
    parser.add_argument("--fault", action="append", choices=sorted(FAULTS), help="only these, each in one round")
    asked = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if asked.seed is None else asked.seed
    built, until = programs.programs(print), time.monotonic() + 60 * asked.minutes
    done: list[Summary] = []
    while True:
        campaign = Campaign(built, seed + len(done), pods=asked.pods, long=True, faults=asked.fault or ())
        try:
            campaign.run()
        finally:
            print(campaign.summary.text(), flush=True)
        done.append(campaign.summary)
        if time.monotonic() > until:
            break
    if len(done) > 1:
        print(total(done))
    return 0


if __name__ == "__main__":
    sys.exit(main())
