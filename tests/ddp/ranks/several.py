"""One rank: the cases of programs, one after the other in one start, as importing torch takes long.

Run as `several.py RANK RANKS FILE PROGRAM[.CASE]...`; prints "ok PROGRAM.CASE" for each, or fails.
"""

import importlib
import sys
import time

from cases import process_group, settle


def run(word):
    name, _, asked = word.partition(".")
    program = importlib.import_module(name)
    if hasattr(program, "start"):
        program.start()
    for case in program.CASES:
        if asked and case.__name__ != asked:
            continue
        settle()
        start = time.monotonic()
        case()
        print(f"ok {name}.{case.__name__} ({time.monotonic() - start:.1f} s)", flush=True)


if __name__ == "__main__":
    with process_group():
        for word in sys.argv[4:]:
            run(word)
