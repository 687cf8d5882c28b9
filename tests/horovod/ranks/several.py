"""One rank: cases of scripts, in one start, as importing a framework takes longer than most.

Run as `several.py SCRIPT.py|SCRIPT:CASE...`; prints "ok SCRIPT:CASE" of each on every rank.
"""

import importlib
import sys
import time
from functools import partial

from cases import settle


def cases_of(word):
    """All of a script, or one; a script whose cases are no functions has its own `named`."""
    script, _, asked = word.partition(":")
    script = script.removesuffix(".py")
    module = importlib.import_module(script)
    if asked:
        return {word: getattr(module, "named", partial(getattr, module))(asked)}
    return {f"{script}:{case.__name__}": case for case in module.CASES}


def main(words):
    hvd = importlib.import_module(words[0].partition(":")[0].removesuffix(".py")).hvd
    if "tensorflow" in sys.modules:
        threading = sys.modules["tensorflow"].config.threading
        threading.set_intra_op_parallelism_threads(1)
        threading.set_inter_op_parallelism_threads(2)
    hvd.init(process_sets="dynamic")
    for word in words:
        for name, case in cases_of(word).items():
            settle()
            start = time.monotonic()
            case()
            if hvd.rank() == 0:
                print(f"{name}: {time.monotonic() - start:.1f} s", flush=True)
            print(f"ok {name}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
