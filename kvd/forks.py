"""How often this process came out of a fork: a tenth of the price of asking for its id."""

import os

count = 0


def _forked() -> None:
    global count
    count += 1


os.register_at_fork(after_in_child=_forked)
