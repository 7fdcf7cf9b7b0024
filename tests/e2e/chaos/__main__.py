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
    parser.add_argument("--seed", type=int, default=None, help="replays a run; random if omitted")
    parser.add_argument("--minutes", type=float, default=0.0, help="continue with the next seeds for this time")
    parser.add_argument("--pods", type=int, default=1000, help="pods in each storm")
    parser.add_argument("--fault", action="append", choices=sorted(FAULTS), help="only these faults, one round each")
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if arguments.seed is None else arguments.seed
    built, until = programs.programs(print), time.monotonic() + 60 * arguments.minutes
    summaries: list[Summary] = []
    while True:
        campaign = Campaign(built, seed + len(summaries), pods=arguments.pods, long=True, faults=arguments.fault or ())
        try:
            campaign.run()
        finally:
            print(campaign.summary.text(), flush=True)
        summaries.append(campaign.summary)
        if time.monotonic() > until:
            break
    if len(summaries) > 1:
        print(total(summaries))
    return 0


if __name__ == "__main__":
    sys.exit(main())
